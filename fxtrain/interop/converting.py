"""Convert checkpoints of other libraries into fxtrain's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor, nn

from fxtrain._reading import StrPath
from fxtrain._record import shown
from fxtrain.checkpoint.json_values import encode
from fxtrain.checkpoint.saving import save_alone
from fxtrain.checkpoint.snapshot import MODEL, Snapshot, model_facts
from fxtrain.errors import CheckpointError
from fxtrain.interop.accelerate_checkpoints import read_accelerate
from fxtrain.interop.dcp_checkpoints import read_dcp, tree_of
from fxtrain.interop.deepspeed_checkpoints import is_deepspeed, read_deepspeed
from fxtrain.interop.megatron_checkpoints import is_megatron, read_megatron
from fxtrain.state import Plan, Position


@attrs.frozen(kw_only=True, eq=False)
class _Found:
    """The state of one model in another library's folder."""

    tensors: Mapping[str, Tensor]
    tied: Mapping[str, str] = attrs.field(factory=dict)
    optimizers: Sequence[Mapping[str, Any]] = ()
    schedulers: Sequence[Mapping[str, Any]] = ()
    scaler: Mapping[str, Any] | None = None


def import_checkpoint(
    source: StrPath,
    folder: StrPath,
    *,
    module: nn.Module | None = None,
    position: Position = Position(),  # noqa: B008 - a frozen value
    optimizer: bool = True,
) -> str:
    """Convert a checkpoint of another library into one that `restore` can load.

    Reads folders of Accelerate's `save_state` with one model, of DeepSpeed's
    `engine.save_checkpoint` at any ZeRO stage, and of `torch.distributed.checkpoint` with a state
    dict `{"model": ..., "optimizer": ...}`. Of Megatron's, reads the weights, as transformers
    names them.

    Args:
        source: The folder to read.
        folder: Folder of checkpoints to write into, or an fsspec URL.
        module: The model, on any device. Needed if the optimizer numbers its parameters
            instead of naming them, and for the names of tied parameters.
        position: Position of the run, which other libraries do not save in this form.
        optimizer: Whether to convert optimizers and schedulers.

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
    model = _read(Path(source), optimizer=optimizer)
    aliases = {**model.tied, **_tied(model.tensors, module)}
    tensors = {f"{MODEL}/module.{name}": tensor for name, tensor in model.tensors.items()}
    values: dict[str, Any] = {"module": {}, "optimizers": []}
    for index, state in enumerate(model.optimizers if optimizer else ()):
        moments, described = _optimizer(state, index, module, model.tensors)
        tensors.update(moments)
        values["optimizers"].append(described)
    values["schedulers"] = list(model.schedulers) if optimizer else []
    values["scaler"] = model.scaler
    inside: dict[str, Tensor] = {}
    facts = model_facts(Plan(), encode(values, f"{MODEL}/values", inside))
    captured = Snapshot(
        tensors={**tensors, **inside},
        aliases={f"{MODEL}/module.{a}": f"{MODEL}/module.{b}" for a, b in aliases.items()},
        varies_by_rank=frozenset(),
        own={},
        models={MODEL: facts},
        extra=None,
        position=position,
        metric=None,
    )
    return save_alone(folder, captured)


def _read(root: Path, *, optimizer: bool) -> _Found:
    if not root.is_dir():
        raise CheckpointError(f"No folder {root}.", code="FX601")
    if is_megatron(root):
        if optimizer:
            raise CheckpointError(
                f"{root} is a checkpoint of Megatron, of which only weights can be converted. Pass "
                f"optimizer=False, or --no-optimizer."
            )
        model = read_megatron(root)
        return _Found(tensors=model.tensors, tied=model.tied)
    if (root / ".metadata").exists():
        return _from_dcp(root, optimizer=optimizer)
    if is_deepspeed(root):
        zero = read_deepspeed(root, optimizer=optimizer)
        return _Found(
            tensors=zero.tensors,
            tied=zero.tied,
            optimizers=[] if zero.optimizer is None else [zero.optimizer],
            schedulers=[] if zero.scheduler is None else [zero.scheduler],
        )
    state = read_accelerate(root)
    if len(state.models) != 1:
        raise CheckpointError(
            f"{root} contains {len(state.models)} models, but only one can be converted. Read "
            f"them with fx.interop.read_accelerate and load each with fx.load_model."
        )
    return _Found(
        tensors=state.models[0],
        optimizers=state.optimizers,
        schedulers=state.schedulers,
        scaler=state.scaler,
    )


def _from_dcp(root: Path, *, optimizer: bool) -> _Found:
    wanted = None if optimizer else (lambda name: name.startswith("model."))
    state = read_dcp(root, only=wanted)
    tree = tree_of(root, state, lambda name: tuple(name.split(".", 1)))
    model = tree.get("model")
    if not isinstance(model, dict):
        raise CheckpointError(
            f"{root} has no entry 'model', only {shown(list(tree))}. Read it with "
            f"fx.interop.read_dcp and load it with fx.load_model(..., prefix=...)."
        )
    optim = tree.get("optimizer", tree.get("optim"))
    return _Found(
        tensors={name: t for name, t in _flat(model).items() if isinstance(t, Tensor)},
        optimizers=[_grouped(optim)] if isinstance(optim, dict) else [],
    )


def _flat(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _grouped(optim: Mapping[str, Any]) -> dict[str, Any]:
    """Turn groups into a list: torch records list indices as keys."""
    groups = [
        {**group, "params": _listed(group.get("params", []))} if isinstance(group, dict) else group
        for group in _listed(optim.get("param_groups", []))
    ]
    return {"state": optim.get("state", {}), "param_groups": groups}


def _listed(value: Any) -> list[Any]:
    if isinstance(value, dict) and all(type(index) is int for index in value):
        return [value[index] for index in sorted(value)]
    if isinstance(value, list | tuple):
        return list(value)
    raise CheckpointError(f"The optimizer state has no list of groups: {shown(value)}.")


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
    state: Mapping[str, Any], index: int, module: nn.Module | None, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    _check_shape(state)
    names = _names_of(state, module)
    if strange := [key for key in state["state"] if key not in names]:
        raise CheckpointError(
            f"The optimizer has a state for {shown(strange[0])}, which is in none of its groups. "
            f"Pass optimizer=False to convert only the weights."
        )
    moments: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for key, entries in state["state"].items():
        name = names[key]
        parts = {part: value for part, value in entries.items() if isinstance(value, Tensor)}
        _check(name, parts, tensors)
        moments.update({f"{MODEL}/optimizer.{index}.{name}.{part}": t for part, t in parts.items()})
        plain = {part: value for part, value in entries.items() if part not in parts}
        values[name] = {"keys": list(entries), "plain": plain}
    groups = [
        {**group, "params": [names[key] for key in group["params"]]}
        for group in state["param_groups"]
    ]
    # These files do not record the type of the optimizer.
    return moments, {"kind": "", "groups": groups, "state": values}


def _check_shape(state: Any) -> None:
    """Raise if a value is not the state dict of an optimizer."""
    entries = state.get("state") if isinstance(state, Mapping) else None
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if (
        not isinstance(entries, Mapping)
        or not all(isinstance(entry, Mapping) for entry in entries.values())
        or not isinstance(groups, list | tuple)
        or not all(
            isinstance(group, Mapping)
            and isinstance(group.get("params"), list | tuple)
            and all(isinstance(key, int | str) for key in group["params"])
            for group in groups
        )
    ):
        raise CheckpointError(
            f"Expected the state dict of an optimizer, with `state` and `param_groups`; found "
            f"{shown(state)}. Pass optimizer=False to convert only the weights."
        )


def _names_of(state: Mapping[str, Any], module: nn.Module | None) -> dict[Any, str]:
    keys = [key for group in state["param_groups"] for key in group["params"]]
    if all(isinstance(key, str) for key in keys):
        return {key: key for key in keys}
    if module is None:
        raise CheckpointError(
            "The optimizer numbers its parameters instead of naming them. Pass module= to give "
            "their order, or optimizer=False to skip the optimizer."
        )
    order = [name for name, p in module.named_parameters() if p.requires_grad]
    if any(type(key) is not int for key in keys) or sorted(keys) != list(range(len(order))):
        raise CheckpointError(
            f"The optimizer has {len(keys)} parameters, but the model has {len(order)} trained "
            f"ones. Pass the model that was saved."
        )
    # torch.distributed.checkpoint turns the numbers into strings.
    return {key: name for i, name in enumerate(order) for key in (i, str(i))}


def _check(name: str, parts: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Raise if shapes differ, which happens if the order is not the model's."""
    for part, tensor in parts.items():
        if name in tensors and tensor.ndim and tensor.shape != tensors[name].shape:
            raise CheckpointError(
                f"{part} of the optimizer has shape {list(tensor.shape)}, but its parameter {name} "
                f"has shape {list(tensors[name].shape)}: the optimizer's parameters are in a "
                f"different order than the model's. Pass optimizer=False."
            )
