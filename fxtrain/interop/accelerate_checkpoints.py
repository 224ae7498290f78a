"""Read folders written by `Accelerator.save_state` of the library Accelerate."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fxtrain._optional import optional
from fxtrain.errors import CheckpointError
from fxtrain.interop.dcp_checkpoints import lists_of, read_tree, tensors_of
from fxtrain.interop.imported import Imported, in_order
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


def read_accelerate(root: Path, *, optimizer: bool) -> Imported:
    """Read models from safetensors, and everything else with `weights_only=True`.

    Also reads the sharded format of the FSDP plugin.
    """
    numbered: dict[str, dict[int, Any]] = {kind: {} for kind in _KINDS}
    for path in sorted(root.iterdir()):
        for kind, pattern in _KINDS.items():
            if (optimizer or kind == "model") and (match := pattern.fullmatch(path.name)):
                if (number := int(match[match.lastindex or 1] or 0)) in numbered[kind]:
                    raise CheckpointError(
                        f"{root} contains {kind} {number} twice. Remove the outdated one of the "
                        f"two."
                    )
                numbered[kind][number] = _contents(root, path, kind)
    if not numbered["model"]:
        raise CheckpointError(
            f"{root} contains no model of Accelerate (model.safetensors, pytorch_model.bin or "
            f"pytorch_model_fsdp_0) and no files of DeepSpeed, Megatron or "
            f"torch.distributed.checkpoint, whose .metadata is missing where saving was "
            f"interrupted. Pass the folder that was saved into.",
            code="FX601",
        )
    models, optimizers, schedulers = (
        in_order(numbered.pop(kind), root, kind) for kind in ("model", "optimizer", "scheduler")
    )
    scaler = numbered.pop("scaler").get(0)
    return Imported(
        models=models, optimizers=optimizers, schedulers=schedulers, scaler=scaler, others=numbered
    )


def _contents(root: Path, path: Path, kind: str) -> Any:
    if path.is_dir():  # of the FSDP plugin, which writes with torch.distributed.checkpoint
        tree = read_tree(path)
        return tensors_of(tree.get(kind, tree)) if kind == "model" else lists_of(tree[kind])
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
