"""Read folders written by `Accelerator.save_state` of the library Accelerate."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxtrain.errors import CheckpointError
from fxtrain.interop.dcp_checkpoints import lists_of, nested_tensors, read_tree
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
    "scaler": re.compile(r"scaler()\.pt"),
}


def read_accelerate(root: Path, *, optimizer: bool) -> Imported:
    """Read models from safetensors, and optimizers and the like with `weights_only=True`.

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
        in_order(numbered[kind], root, kind) for kind in ("model", "optimizer", "scheduler")
    )
    scaler = numbered["scaler"].get(0)
    return Imported(models=models, optimizers=optimizers, schedulers=schedulers, scaler=scaler)


def _contents(root: Path, path: Path, kind: str) -> Any:
    if path.is_dir():  # of the FSDP plugin, which writes with torch.distributed.checkpoint
        tree = read_tree(path)
        return nested_tensors(tree.get(kind, tree)) if kind == "model" else lists_of(tree[kind])
    if kind == "model":
        with open_source(inside(root, path.name)) as source:
            return {name: source.read(name, None) for name in source.entries} | {
                other: source.read(stored, None) for other, stored in source.others.items()
            }
    contents = load_weights_only(inside(root, path.name), str(path))
    if not isinstance(contents, Mapping):
        raise CheckpointError(f"{path} contains a {type(contents).__name__}, not a state dict.")
    return contents
