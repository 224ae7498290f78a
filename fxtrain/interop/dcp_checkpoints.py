"""Read checkpoints of torch.distributed.checkpoint without trusting their pickles.

The index of such a checkpoint, `.metadata`, is a pickle of torch's records. It is read into inert
placeholder classes.
"""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxtrain._reading import open_file, read_file
from fxtrain._record import shown
from fxtrain.checkpoint.manifest import covers
from fxtrain.errors import CheckpointError
from fxtrain.interop.imported import Imported
from fxtrain.models.pickles import load_records, load_weights_only
from fxtrain.models.tensor_sources import inside

_METADATA = ".metadata"
_OPTIMIZERS = ("optimizer.", "optim.")
_MAX_BYTES = 1_000_000_000  # bytes of an index
# Of its index; Megatron keeps its plans for saving there too.
_RECORDS = "torch.distributed.checkpoint."


_Read = Callable[[], Any]


def is_dcp(folder: Path) -> bool:
    """Whether a folder has the index of such a checkpoint, which torch writes last."""
    return (folder / _METADATA).is_file()


def read_dcp(root: Path, *, optimizer: bool) -> Imported:
    """Read a state dict; of one without the entry "model", all tensors are those of the model."""
    if optimizer:
        tree = read_tree(root)
    else:
        tree = read_tree(root, lambda name: not name.startswith(_OPTIMIZERS), values=False)
    states = [lists_of(tree.pop(name)) for name in ("optimizer", "optim") if name in tree]
    model = nested_tensors(tree.pop("model") if "model" in tree else tree)
    return Imported(models=(model,), optimizers=tuple(states), others=tree)


def read_tree(
    root: Path, only: Callable[[str], bool] = lambda name: True, *, values: bool = True
) -> dict[Any, Any]:
    """The nested state dict that was saved, with full tensors; `values=False` reads only these."""
    index = load_records(read_file(inside(root, _METADATA), _MAX_BYTES), _RECORDS).fields
    records = {
        name: entry
        for name, entry in index["state_dict_metadata"].items()
        if only(name) and (values or entry.kind == "TensorStorageMetadata")
    }
    parts: dict[str, dict[tuple[int, ...] | None, _Read]] = {name: {} for name in records}
    for key, info in index["storage_data"].items():
        name, where = key.fields["fqn"], info.fields
        if where.get("transform_descriptors"):
            raise CheckpointError(
                f"{root}: {shown(name)} is stored with {shown(where['transform_descriptors'])}, "
                f"which only torch can undo. Save the checkpoint again without it."
            )
        if name in parts:
            parts[name][key.fields.get("offset")] = _part_of(root, name, where)
    recorded = index.get("planner_data")
    paths: dict[str, Any] = recorded if isinstance(recorded, dict) else {}
    tree: dict[Any, Any] = {}
    for name, record in records.items():
        if record.kind == "TensorStorageMetadata":
            value = _tensor(record.fields, parts[name])
        else:
            (read,) = parts[name].values()
            value = read()
        *keys, last = paths.get(name) or name.split(".", 1)
        node: Any = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def _part_of(root: Path, name: str, where: Mapping[str, Any]) -> _Read:
    """What reads one entry of the index: a part of a tensor, or a value."""
    path, start, length = inside(root, where["relative_path"]), where["offset"], where["length"]
    if not 0 <= start <= start + length <= path.stat().st_size:
        raise ValueError(f"{shown(name)} is not inside {path.name}")

    def read() -> Any:
        with open_file(path) as file:
            file.seek(start)
            return load_weights_only(io.BytesIO(file.read(length)), f"{root}: {name}")

    return read


def _tensor(entry: Mapping[str, Any], parts: Mapping[Any, _Read]) -> Tensor:
    """Assemble a full tensor from the parts that cover it."""
    shape, state = entry["size"], entry["properties"].state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    boxes = [(part.fields["offsets"], part.fields["sizes"]) for part in entry["chunks"]]
    # The parts are read first, since a file cannot have more than it has, but an index can say so.
    values = [parts[offsets]() for offsets, _ in boxes]
    for part, (_, sizes) in zip(values, boxes, strict=True):
        if (tuple(part.shape), part.dtype) != (sizes, dtype):
            raise ValueError("a part of a tensor does not match the index")
    if not covers(shape, boxes):
        raise ValueError(f"the parts of a tensor do not fill its shape {shown(shape)}")
    if len(boxes) == 1:
        return values[0]
    full = torch.empty(shape, dtype=dtype, device="cpu")
    for part, (offsets, sizes) in zip(values, boxes, strict=True):
        full[tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))] = part
    return full


def nested_tensors(tree: Mapping[Any, Any], prefix: str = "") -> dict[str, Tensor]:
    """The tensors in nested dicts, by the names that a module has for them."""
    tensors: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            tensors.update(nested_tensors(value, f"{prefix}{key}."))
        elif isinstance(value, Tensor):
            tensors[f"{prefix}{key}"] = value
    return tensors


def lists_of(tree: Any) -> Any:
    """Turn mappings from 0, 1, … back into lists."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(type(key) is int for key in tree) and sorted(tree) == list(range(len(tree))):
        return [lists_of(tree[index]) for index in range(len(tree))]
    return {key: lists_of(value) for key, value in tree.items()}
