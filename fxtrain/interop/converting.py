"""Read checkpoints of other libraries, and convert them into fxtrain's."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fxtrain._reading import StrPath
from fxtrain.backends.core.optimizers import Optimizers, Params
from fxtrain.checkpoint.saving import save_alone
from fxtrain.errors import CheckpointError
from fxtrain.interop.accelerate_checkpoints import read_accelerate
from fxtrain.interop.dcp_checkpoints import is_dcp, read_dcp
from fxtrain.interop.deepspeed_checkpoints import is_deepspeed, read_deepspeed
from fxtrain.interop.imported import Imported, expected_layout, named_tensors
from fxtrain.interop.megatron_checkpoints import is_megatron, read_megatron
from fxtrain.ops.optimizer_settings import flattened
from fxtrain.state import Key, ModelState, Position
from fxtrain.state.keys import OPTIMIZER, WEIGHTS


def read_checkpoint(
    folder: StrPath, *, optimizer: bool = True, args: Mapping[str, Any] | None = None
) -> Imported:
    """Read a checkpoint of another library.

    Reads folders of Accelerate's `save_state`, of DeepSpeed's `engine.save_checkpoint` at any ZeRO
    stage, of `torch.distributed.checkpoint`, and of Megatron-core in its formats `torch` and
    `torch_dist`, written by any number of ranks. Of Megatron, reads the weights of a Llama, Qwen2
    or GPT without experts.

    Args:
        folder: The folder, or the one in which such folders are.
        optimizer: Whether to read more than the models' tensors.
        args: Arguments of Megatron that replace those in the files, such as a `vocab_size`
            without the padding, where these lack some.

    Effects:
        Reads the files of all ranks, with the full state in memory. Runs no code from the files.

    Raises:
        CheckpointError: the folder has none of these formats, is damaged or incomplete, uses
            parallelism whose parts cannot be merged, or has values that torch rejects with
            `weights_only=True`.

    Example:
        >>> import fxtrain as fx
        >>> fx.interop.read_checkpoint("runs/nowhere")
        Traceback (most recent call last):
        fxtrain.errors.CheckpointError: No folder runs/nowhere. [FX601]
    """
    root = Path(folder)
    if not root.is_dir():
        raise CheckpointError(f"No folder {root}.", code="FX601")
    layout, read = "Accelerate", partial(read_accelerate, optimizer=optimizer)
    if is_megatron(root):
        layout, read = "Megatron-core 0.16", partial(read_megatron, overrides=args or {})
    elif is_dcp(root):
        layout, read = "torch.distributed.checkpoint", partial(read_dcp, optimizer=optimizer)
    elif is_deepspeed(root):
        layout, read = "DeepSpeed 0.19", partial(read_deepspeed, optimizer=optimizer)
    with expected_layout(root, layout):
        return read(root)


def import_checkpoint(
    source: StrPath,
    folder: StrPath,
    *,
    module: nn.Module | None = None,
    position: Position = Position(),  # noqa: B008 - a frozen value
    optimizer: bool | Callable[[Params], Optimizers] = True,
) -> str:
    """Convert a checkpoint of another library into one that `restore` can load.

    Args:
        source: A folder with one model, as for `read_checkpoint`. The state dict of a
            `torch.distributed.checkpoint` has the entries "model" and "optimizer", or is that of
            the model.
        folder: Folder of checkpoints to write into, or an fsspec URL.
        module: The model, on any device. Needed if the optimizer numbers its parameters
            instead of naming them, and for the names of tied parameters.
        position: Position of the run, which other libraries do not save in this form.
        optimizer: Whether to convert optimizers and schedulers. Or the factory for `fx.wrap`, whose
            groups give the order of numbered parameters that is not the module's, as where
            some have no weight decay.

    Returns:
        The path of the checkpoint.

    Effects:
        Reads and writes files, with the full state in memory. Runs no code from the files.
        Skips random generators. No collectives: call it on one rank.

    Raises:
        CheckpointError: the folder has none of these formats, is damaged, or contains values
            that torch rejects with `weights_only=True`; or the names of an optimizer's
            parameters are unknown.

    Example:
        >>> import fxtrain as fx
        >>> fx.interop.import_checkpoint("runs/nowhere", "runs/a")
        Traceback (most recent call last):
        fxtrain.errors.CheckpointError: No folder runs/nowhere. [FX601]
    """
    found = read_checkpoint(source, optimizer=bool(optimizer))
    factory = optimizer if callable(optimizer) else None
    if found.config and optimizer:
        raise CheckpointError(
            f"{source} is a checkpoint of Megatron, of which only weights can be converted. Pass "
            f"optimizer=False, or --no-optimizer."
        )
    if len(found.models) != 1:
        raise CheckpointError(
            f"{source} contains {len(found.models)} models, but only one can be converted. Read "
            f"them with fx.interop.read_checkpoint and load each with fx.load_model."
        )
    with expected_layout(Path(source), "a supported checkpoint"):
        weights = named_tensors(found.models[0])
        aliases = {**found.tied, **_tied(weights, module)}
        tensors = {Key(WEIGHTS, name): tensor for name, tensor in weights.items()}
        optimizers: list[Any] = []
        for index, state in enumerate(found.optimizers):
            moments, described = _optimizer(state, index, module, weights, factory)
            tensors.update(moments)
            optimizers.append(described)
        values = {"module": {}, "optimizers": optimizers, "schedulers": list(found.schedulers)}
        values["scaler"] = found.scaler
        state = ModelState(tensors=tensors, own={}, values=values)
        keys = {Key(WEIGHTS, name): Key(WEIGHTS, stored) for name, stored in aliases.items()}
    return save_alone(folder, state, keys, position)


def _tied(tensors: Mapping[str, Tensor], module: nn.Module | None) -> dict[str, str]:
    """Aliases: the module's further names of tensors that the files store under one name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    state = {} if module is None else module.state_dict(keep_vars=True)
    for name in sorted(state, key=lambda name: name not in tensors):
        stored = first.setdefault(id(state[name]), name)
        if name not in tensors and stored in tensors:
            aliases[name] = stored
    return aliases


def _optimizer(
    state: Mapping[str, Any],
    index: int,
    module: nn.Module | None,
    tensors: Mapping[str, Tensor],
    factory: Callable[[Params], Optimizers] | None,
) -> tuple[dict[Key, Tensor], dict[str, Any]]:
    """The tensors of an optimizer by key, and its values as a checkpoint has them."""
    names = _names_of(state, module, index, factory)
    named = () if module is None else module.named_parameters()
    # Scripts of other libraries pass these to optimizers too, which `fx.wrap` does not.
    frozen = {name for name, parameter in named if not parameter.requires_grad}
    moments: dict[Key, Tensor] = {}
    values: dict[str, Any] = {}
    keyed: dict[Any, Any] = {}
    for key, entries in state["state"].items():
        if key not in names:
            keyed[key] = entries
            continue
        name = names[key]
        plain: dict[str, Any] = {}
        for part, value in entries.items():
            if not isinstance(value, Tensor):
                plain[part] = value
                continue
            if name in tensors and value.ndim and value.shape != tensors[name].shape:
                raise CheckpointError(
                    f"{part} of the optimizer has shape {list(value.shape)}, but its parameter "
                    f"{name} has shape {list(tensors[name].shape)}: the optimizer's parameters "
                    f"are in a different order than the model's. Pass optimizer= the factory that "
                    f"builds it with the same groups, or False."
                )
            moments[Key.of(OPTIMIZER, index, name, part)] = value
        values[name] = {"keys": list(entries), "plain": plain}
    groups = [
        {**group, "params": [names[key] for key in group["params"] if names[key] not in frozen]}
        for group in state["param_groups"]
    ]
    own = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    # These files do not record the type of the optimizer.
    described = {"kind": "", "groups": groups, "state": values}
    return moments, {**described, "keyed": keyed, "own": own}


def _names_of(
    state: Mapping[str, Any],
    module: nn.Module | None,
    index: int,
    factory: Callable[[Params], Optimizers] | None,
) -> dict[Any, str]:
    keys = [key for group in state["param_groups"] for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        return {key: key for key in keys}
    if module is None:
        raise CheckpointError(
            "The optimizer numbers its parameters instead of naming them. Pass module= to give "
            "their order, or optimizer=False to skip the optimizer."
        )
    every = dict(module.named_parameters())
    trained = [name for name, parameter in every.items() if parameter.requires_grad]
    order = list(every) if len(keys) == len(every) else trained
    if factory is not None:
        optimizers = flattened(factory(Params((name, every[name]) for name in order)))
        groups = [group for each in optimizers[index : index + 1] for group in each.param_groups]
        known = {id(parameter): name for name, parameter in every.items()}
        order = [known.get(id(p), "") for group in groups for p in group["params"]]
    if sorted(keys) != list(range(len(order))) or "" in order:
        made = "" if factory is None else f", and optimizer= has {len(order) - order.count('')}"
        raise CheckpointError(
            f"The optimizer has {len(keys)} parameters, but the model has {len(every)}, of which "
            f"{len(trained)} are trained{made}. Pass the model and the optimizer that were saved."
        )
    # torch.distributed.checkpoint turns the numbers into strings.
    return {key: name for i, name in enumerate(order) for key in (i, str(i))}
