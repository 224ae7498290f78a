"""Reading what `Accelerator.save_state` of the library Accelerate wrote."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._errors import CheckpointError
from fxtrain._optional import optional
from fxtrain.interop.dcp_checkpoints import read_dcp, tree_of
from fxtrain.models.pickles import load_weights_only
from fxtrain.models.tensor_sources import inside, open_source

__all__ = ["AcceleratorState", "read_accelerate"]

# The first of several has no number in its name; what a folder holds instead was sharded.
_MODELS = re.compile(r"(?:model|pytorch_model)(?:_(\d+))?\.(?:safetensors|bin)")
_SPREAD = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)")
_STATES = re.compile(r"(optimizer|scheduler|dl_state_dict)(?:_(\d+))?\.bin")
_RANDOM = re.compile(r"random_states_(\d+)\.pkl")
_CUSTOM = re.compile(r"custom_checkpoint_(\d+)\.pkl")


@attrs.frozen(kw_only=True, eq=False)
class AcceleratorState:
    """What a folder of `Accelerator.save_state` holds.

    Attributes:
        models: Tensors by name, per model, in the order in which they were prepared.
        optimizers: State dicts, per optimizer.
        schedulers: State dicts, per scheduler.
        loaders: State dicts of stateful data loaders, by their place.
        scaler: State dict of the loss scaler, or None.
        random: Per rank, the state of each generator, with arrays as tensors.
        step: Calls of `accelerator.step` so far, or None.
        custom: State dicts of objects registered for checkpointing.
    """

    models: tuple[Mapping[str, Tensor], ...]
    optimizers: tuple[Mapping[str, Any], ...]
    schedulers: tuple[Mapping[str, Any], ...]
    loaders: Mapping[int, Mapping[str, Any]]
    scaler: Mapping[str, Any] | None
    random: Mapping[int, Mapping[str, Any]]
    step: int | None
    custom: tuple[Any, ...]


def read_accelerate(folder: Any) -> AcceleratorState:
    """Read a folder that `Accelerator.save_state` wrote.

    Models are read from safetensors; everything else as far as `weights_only=True` allows. The
    sharded form of its FSDP plugin is read too; that of its DeepSpeed plugin is not.

    Args:
        folder: The folder that was passed to `save_state`.

    Effects:
        Reads the files. No code from them runs.

    Raises:
        CheckpointError: the folder is no such checkpoint, or a file of it is damaged, missing
            or a pickle that torch refuses under `weights_only=True`.
        MissingPackageError: random states need NumPy, since Accelerate stores arrays in them.

    Example:
        >>> from fxtrain.interop import read_accelerate
        >>> read_accelerate("runs/nowhere")
        Traceback (most recent call last):
        fxtrain._errors.CheckpointError: runs/nowhere holds no model of Accelerate...
    """
    root = Path(folder)
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    models: dict[int, Mapping[str, Tensor]] = {}
    states: dict[str, dict[int, Any]] = {"optimizer": {}, "scheduler": {}, "dl_state_dict": {}}
    for name in names:
        if found := _MODELS.fullmatch(name):
            _put(models, int(found[1] or 0), _model(inside(root, name)), root, "model")
        elif (found := _SPREAD.fullmatch(name)) and (root / name).is_dir():
            into = models if found[1] == "pytorch_model_fsdp" else states["optimizer"]
            _put(into, int(found[2]), _spread(root / name, found[1]), root, found[1])
        elif found := _STATES.fullmatch(name):
            state = _state(root, name)
            _put(states[found[1]], int(found[2] or 0), state, root, found[1])
    if not models:
        raise CheckpointError(
            f"{root} holds no model of Accelerate: there is no model.safetensors, no "
            f"pytorch_model.bin and no pytorch_model_fsdp_0. It holds "
            f"{', '.join(names[:10]) or 'nothing'}."
        )
    random = {
        rank: _mapping(state, root / f"random_states_{rank}.pkl")
        for rank, state in _numbered(root, names, _RANDOM).items()
    }
    steps = [state["step"] for state in random.values() if "step" in state]
    scaler = None
    if "scaler.pt" in names:
        scaler = _state(root, "scaler.pt")
    return AcceleratorState(
        models=_in_order(models, root, "model"),
        optimizers=_in_order(states["optimizer"], root, "optimizer"),
        schedulers=_in_order(states["scheduler"], root, "scheduler"),
        loaders=states["dl_state_dict"],
        scaler=scaler,
        random={rank: _without(state, "step") for rank, state in random.items()},
        step=steps[0] if steps else None,
        custom=_in_order(_numbered(root, names, _CUSTOM), root, "custom checkpoint"),
    )


def _state(root: Path, name: str) -> Mapping[str, Any]:
    return _mapping(load_weights_only(inside(root, name), str(root / name)), root / name)


def _mapping(state: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state dict.")
    return state


def _model(path: Path) -> dict[str, Tensor]:
    with open_source(path) as source:
        return {name: source.read(name, None) for name in source.entries} | {
            other: source.read(kept, None) for other, kept in source.others.items()
        }


def _spread(folder: Path, kind: str) -> Mapping[str, Any]:
    """The model or optimizer that the FSDP plugin wrote by torch.distributed.checkpoint."""
    found = read_dcp(folder)
    if kind == "pytorch_model_fsdp":
        return {name.removeprefix("model."): tensor for name, tensor in found.tensors.items()}
    tree = tree_of(folder, found, lambda name: (name,))
    return _mapping(_lists(tree.get("optimizer", tree)), folder)


def _lists(tree: Any) -> Any:
    """Mappings from 0, 1, … back to the lists that they were."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(type(key) is int for key in tree) and sorted(tree) == list(range(len(tree))):
        return [_lists(tree[place]) for place in range(len(tree))]
    return {key: _lists(value) for key, value in tree.items()}


def _numbered(root: Path, names: list[str], pattern: re.Pattern[str]) -> dict[int, Any]:
    """Files whose pickles hold NumPy arrays, by their number; arrays become tensors."""
    found = {int(match[1]): name for name in names if (match := pattern.fullmatch(name))}
    if not found:
        return {}
    numpy = optional("numpy", extra="test", needed_by="reading Accelerate's random states")
    codecs = optional("_codecs", extra="test", needed_by="reading Accelerate's random states")
    # The types by which a NumPy array is pickled: numbers, and nothing that runs.
    core = getattr(numpy, "_core", None) or numpy.core
    plain = [core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, codecs.encode]
    plain += [type(numpy.dtype(kind)) for kind in ("u4", "u8", "i8", "f8")]
    with torch.serialization.safe_globals(plain):
        loaded = {
            place: load_weights_only(inside(root, name), str(root / name))
            for place, name in found.items()
        }
    return {place: _tensors(value, numpy.ndarray) for place, value in loaded.items()}


def _tensors(tree: Any, array: type) -> Any:
    if isinstance(tree, array):
        if tree.dtype.kind not in "biuf" or not hasattr(torch, str(tree.dtype)):
            raise CheckpointError(f"Random states hold an array of {tree.dtype}, not of numbers.")
        return torch.tensor(tree.tolist(), dtype=getattr(torch, str(tree.dtype)))  # type: ignore[attr-defined]
    if isinstance(tree, dict):
        return {key: _tensors(value, array) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_tensors(value, array) for value in tree)
    return tree


def _put(into: dict[int, Any], place: int, value: Any, root: Path, what: str) -> None:
    if place in into:
        raise CheckpointError(f"{root} holds {what} {place} twice, and one of them is stale.")
    into[place] = value


def _in_order(found: Mapping[int, Any], root: Path, what: str) -> tuple[Any, ...]:
    if sorted(found) != list(range(len(found))):
        raise CheckpointError(f"{root} holds {what} {sorted(found)}, and not those between.")
    return tuple(found[place] for place in sorted(found))


def _without(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in table.items() if name != key}
