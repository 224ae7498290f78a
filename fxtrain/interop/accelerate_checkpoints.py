"""Read folders written by `Accelerator.save_state` of the library Accelerate."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._display import describe
from fxtrain._optional import optional
from fxtrain._reading import StrPath
from fxtrain.errors import CheckpointError
from fxtrain.interop.dcp_checkpoints import read_dcp, tree_of
from fxtrain.models.pickles import load_weights_only
from fxtrain.models.tensor_sources import inside, open_source

# The first of several has no number in its name. A folder in place of a file is sharded.
_MODELS = re.compile(r"(?:model|pytorch_model)(?:_(\d+))?\.(?:safetensors|bin)")
_SHARDED = re.compile(r"(pytorch_model_fsdp|optimizer)_(\d+)")
_STATES = re.compile(r"(optimizer|scheduler|dl_state_dict)(?:_(\d+))?\.bin")
_RANDOM = re.compile(r"random_states_(\d+)\.pkl")
_CUSTOM = re.compile(r"custom_checkpoint_(\d+)\.pkl")


@attrs.frozen(kw_only=True, eq=False)
class AcceleratorState:
    """The contents of a folder written by `Accelerator.save_state`.

    Attributes:
        models: Tensors by name for each model, in the order of `prepare`.
        optimizers: A state dict per optimizer.
        schedulers: A state dict per scheduler.
        loaders: State dicts of stateful data loaders, by index.
        scaler: State dict of the loss scaler, or None.
        random: State of each generator, per rank; arrays are tensors.
        step: Calls of `accelerator.step` so far, or None.
        custom: State dicts of objects registered for checkpointing.
    """

    models: tuple[Mapping[str, Tensor], ...] = attrs.field(repr=describe)
    optimizers: tuple[Mapping[str, Any], ...] = attrs.field(repr=describe)
    schedulers: tuple[Mapping[str, Any], ...] = attrs.field(repr=describe)
    loaders: Mapping[int, Mapping[str, Any]] = attrs.field(repr=describe)
    scaler: Mapping[str, Any] | None = attrs.field(repr=describe)
    random: Mapping[int, Mapping[str, Any]] = attrs.field(repr=describe)
    step: int | None
    custom: tuple[Any, ...] = attrs.field(repr=describe)


def read_accelerate(folder: StrPath) -> AcceleratorState:
    """Read a folder that `Accelerator.save_state` wrote.

    Reads models from safetensors, and everything else with `weights_only=True`. Also reads the
    sharded format of the FSDP plugin, but not that of the DeepSpeed plugin.

    Args:
        folder: The folder that was passed to `save_state`.

    Effects:
        Reads the files. No code from them runs.

    Raises:
        CheckpointError: the folder is not such a checkpoint, or a file in it is damaged, missing
            or a pickle that torch rejects with `weights_only=True`.
        MissingPackageError: NumPy is missing; Accelerate stores random states as arrays.

    Example:
        >>> from fxtrain.interop import read_accelerate
        >>> read_accelerate("runs/nowhere")
        Traceback (most recent call last):
        fxtrain.errors.CheckpointError: runs/nowhere contains no model of Accelerate...
    """
    root = Path(folder)
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    models: dict[int, Mapping[str, Tensor]] = {}
    states: dict[str, dict[int, Any]] = {"optimizer": {}, "scheduler": {}, "dl_state_dict": {}}
    for name in names:
        if match := _MODELS.fullmatch(name):
            _put(models, int(match[1] or 0), _model(inside(root, name)), root, "model")
        elif (match := _SHARDED.fullmatch(name)) and (root / name).is_dir():
            into = models if match[1] == "pytorch_model_fsdp" else states["optimizer"]
            _put(into, int(match[2]), _sharded(root / name, match[1]), root, match[1])
        elif match := _STATES.fullmatch(name):
            state = _state(root, name)
            _put(states[match[1]], int(match[2] or 0), state, root, match[1])
    if not models:
        raise CheckpointError(
            f"{root} contains no model of Accelerate: no model.safetensors, pytorch_model.bin or "
            f"pytorch_model_fsdp_0, but {', '.join(names[:10]) or 'nothing else'}. Pass the "
            f"folder that was passed to save_state.",
            code="FX601",
        )
    random = {
        rank: _mapping(state, root / f"random_states_{rank}.pkl")
        for rank, state in _numbered(root, names, _RANDOM).items()
    }
    steps = [state["step"] for state in random.values() if "step" in state]
    return AcceleratorState(
        models=_in_order(models, root, "model"),
        optimizers=_in_order(states["optimizer"], root, "optimizer"),
        schedulers=_in_order(states["scheduler"], root, "scheduler"),
        loaders=states["dl_state_dict"],
        scaler=_state(root, "scaler.pt") if "scaler.pt" in names else None,
        random={
            rank: {name: value for name, value in state.items() if name != "step"}
            for rank, state in random.items()
        },
        step=steps[0] if steps else None,
        custom=_in_order(_numbered(root, names, _CUSTOM), root, "custom checkpoint"),
    )


def _state(root: Path, name: str) -> Mapping[str, Any]:
    return _mapping(load_weights_only(inside(root, name), str(root / name)), root / name)


def _mapping(state: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} contains a {type(state).__name__}, not a state dict.")
    return state


def _model(path: Path) -> dict[str, Tensor]:
    with open_source(path) as source:
        return {name: source.read(name, None) for name in source.entries} | {
            other: source.read(stored, None) for other, stored in source.others.items()
        }


def _sharded(folder: Path, kind: str) -> Mapping[str, Any]:
    """A model or optimizer that the FSDP plugin wrote with torch.distributed.checkpoint."""
    state = read_dcp(folder)
    if kind == "pytorch_model_fsdp":
        return {name.removeprefix("model."): tensor for name, tensor in state.tensors.items()}
    tree = tree_of(folder, state, lambda name: (name,))
    return _mapping(_lists(tree.get("optimizer", tree)), folder)


def _lists(tree: Any) -> Any:
    """Turn mappings from 0, 1, … back into lists."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(type(key) is int for key in tree) and sorted(tree) == list(range(len(tree))):
        return [_lists(tree[index]) for index in range(len(tree))]
    return {key: _lists(value) for key, value in tree.items()}


def _numbered(root: Path, names: list[str], pattern: re.Pattern[str]) -> dict[int, Any]:
    """Load pickles that contain NumPy arrays, by file number; arrays become tensors."""
    files = {int(match[1]): name for name in names if (match := pattern.fullmatch(name))}
    if not files:
        return {}
    numpy = optional("numpy", extra="test", needed_by="reading Accelerate's random states")
    codecs = optional("_codecs", extra="test", needed_by="reading Accelerate's random states")
    # The types in a pickled NumPy array: only numbers, no code.
    core = getattr(numpy, "_core", None) or numpy.core
    plain = [core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, codecs.encode]
    plain += [type(numpy.dtype(kind)) for kind in ("u4", "u8", "i8", "f8")]
    with torch.serialization.safe_globals(plain):
        loaded = {
            number: load_weights_only(inside(root, name), str(root / name))
            for number, name in files.items()
        }
    return {number: _tensors(value, numpy.ndarray) for number, value in loaded.items()}


def _tensors(tree: Any, array: type) -> Any:
    if isinstance(tree, array):
        if tree.dtype.kind not in "biuf" or not hasattr(torch, str(tree.dtype)):
            raise CheckpointError(f"The random states contain a non-numeric array ({tree.dtype}).")
        return torch.tensor(tree.tolist(), dtype=getattr(torch, str(tree.dtype)), device="cpu")  # type: ignore[attr-defined]
    if isinstance(tree, dict):
        return {key: _tensors(value, array) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_tensors(value, array) for value in tree)
    return tree


def _put(into: dict[int, Any], index: int, value: Any, root: Path, what: str) -> None:
    if index in into:
        raise CheckpointError(
            f"{root} contains {what} {index} twice. Remove the outdated one of the two."
        )
    into[index] = value


def _in_order(by_number: Mapping[int, Any], root: Path, what: str) -> tuple[Any, ...]:
    if sorted(by_number) != list(range(len(by_number))):
        raise CheckpointError(
            f"{root} contains {what} {sorted(by_number)}, but not those in between. Copy all files."
        )
    return tuple(by_number[index] for index in sorted(by_number))
