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
from fxtrain.interop.dcp_checkpoints import (
    expected_layout,
    in_order,
    lists_of,
    read_dcp,
    tree_of,
)
from fxtrain.models.pickles import load_weights_only
from fxtrain.models.tensor_sources import inside, open_source

# The first of several has no number in its name. A folder in place of a file is sharded.
_KINDS = {
    "model": re.compile(
        r"(?:model|pytorch_model)(?:_(\d+))?\.(?:safetensors|bin)|pytorch_model_fsdp_(\d+)"
    ),
    "optimizer": re.compile(r"optimizer(?:_(\d+))?(?:\.bin)?"),
    "scheduler": re.compile(r"scheduler(?:_(\d+))?\.bin"),
    "loader": re.compile(r"dl_state_dict(?:_(\d+))?\.bin"),
    "scaler": re.compile(r"scaler()\.pt"),
    "random states": re.compile(r"random_states_(\d+)\.pkl"),
    "custom checkpoint": re.compile(r"custom_checkpoint_(\d+)\.pkl"),
}


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
    with expected_layout(root, "Accelerate"):
        return _read(root)


def _read(root: Path) -> AcceleratorState:
    numbered: dict[str, dict[int, Any]] = {kind: {} for kind in _KINDS}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        for kind, pattern in _KINDS.items():
            if match := pattern.fullmatch(path.name):
                if (number := int(match[match.lastindex or 1] or 0)) in numbered[kind]:
                    raise CheckpointError(
                        f"{root} contains {kind} {number} twice. Remove the outdated one of the "
                        f"two."
                    )
                numbered[kind][number] = _contents(root, path, kind)
    if not numbered["model"]:
        raise CheckpointError(
            f"{root} contains no model of Accelerate: no model.safetensors, pytorch_model.bin or "
            f"pytorch_model_fsdp_0. Pass the folder that was passed to save_state.",
            code="FX601",
        )
    models, optimizers, schedulers, custom = (
        tuple(in_order(numbered[kind], root, kind))
        for kind in ("model", "optimizer", "scheduler", "custom checkpoint")
    )
    random = {rank: dict(state) for rank, state in numbered["random states"].items()}
    steps = [state.pop("step", None) for state in random.values()]
    return AcceleratorState(
        models=models,
        optimizers=optimizers,
        schedulers=schedulers,
        loaders=numbered["loader"],
        scaler=numbered["scaler"].get(0),
        random=random,
        step=next((step for step in steps if step is not None), None),
        custom=custom,
    )


def _contents(root: Path, path: Path, kind: str) -> Any:
    if path.is_dir():  # of the FSDP plugin, which writes with torch.distributed.checkpoint
        state = read_dcp(path)
        if kind == "model":
            return {name.removeprefix("model."): t for name, t in state.tensors.items()}
        tree = tree_of(state, lambda name: (name,))
        return lists_of(tree.get("optimizer", tree))
    if kind == "model":
        with open_source(inside(root, path.name)) as source:
            return {name: source.read(name, None) for name in source.entries} | {
                other: source.read(stored, None) for other, stored in source.others.items()
            }
    with torch.serialization.safe_globals(_numpy_types() if path.suffix == ".pkl" else []):
        contents = _tensors(load_weights_only(inside(root, path.name), str(path)))
    if kind != "custom checkpoint" and not isinstance(contents, Mapping):
        raise CheckpointError(f"{path} contains a {type(contents).__name__}, not a state dict.")
    return contents


def _numpy_types() -> list[Any]:
    """The types in a pickled NumPy array: only numbers, no code."""
    numpy = optional("numpy", extra="test", needed_by="reading Accelerate's random states")
    codecs = optional("_codecs", extra="test", needed_by="reading Accelerate's random states")
    core = getattr(numpy, "_core", None) or numpy.core
    plain = [core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, codecs.encode]
    return plain + [type(numpy.dtype(kind)) for kind in ("u4", "u8", "i8", "f8")]


def _tensors(tree: Any) -> Any:
    """A tree with tensors in place of arrays."""
    if type(tree).__module__ == "numpy":
        return torch.tensor(tree.tolist(), dtype=getattr(torch, str(tree.dtype)), device="cpu")
    if isinstance(tree, dict):
        return {key: _tensors(value) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_tensors(value) for value in tree)
    return tree
