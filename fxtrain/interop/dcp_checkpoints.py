"""Read checkpoints of torch.distributed.checkpoint without trusting their pickles.

The index of such a checkpoint, `.metadata`, is a pickle of torch's records. It is read into inert
placeholder classes.
"""

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._display import describe
from fxtrain._reading import StrPath, open_file, read_file
from fxtrain._record import shown
from fxtrain.checkpoint.manifest import covers
from fxtrain.errors import CheckpointError, FxError
from fxtrain.models.pickles import load_records, load_weights_only
from fxtrain.models.tensor_sources import inside

_METADATA = ".metadata"
_MAX_BYTES = 1_000_000_000  # bytes of an index
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    # Megatron keeps its plans for saving in the index.
    "torch.distributed.checkpoint.planner": (
        "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
    ),
}  # fmt: skip


@contextmanager
def expected_layout(path: Path, layout: str) -> Iterator[None]:
    """Raise a CheckpointError for whatever unexpected contents make a reader raise.

    Args:
        path: The checkpoint, for the message.
        layout: What was expected.
    """
    try:
        yield
    except FxError:
        raise
    except Exception as error:  # damaged pickles may raise anything
        raise CheckpointError(
            f"{path} is damaged, or does not have the layout of {layout} "
            f"({type(error).__name__}: {str(error)[:500]}).",
            code="FX602",
        ) from error


def in_order(by_number: Mapping[int, Any], root: Path, what: str) -> list[Any]:
    """The contents of numbered files, of which none may be missing."""
    if sorted(by_number) != list(range(len(by_number))):
        raise CheckpointError(
            f"{root} contains {what} {sorted(by_number)}, but not those in between. Copy all files."
        )
    return [by_number[number] for number in sorted(by_number)]


def named_tensors(table: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The table, after checking that it has tensors by name."""
    for name, value in table.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise TypeError(f"{shown(name)} is not a tensor")
    return dict(table)


@attrs.frozen(kw_only=True, eq=False)
class DcpState:
    """The contents of a checkpoint of torch.distributed.checkpoint.

    Attributes:
        tensors: Full tensors by name, on the CPU.
        values: Everything else by name: numbers, text, and containers of them.
        paths: The keys of each name in the saved state dict, if torch recorded them.
        refused: Values that torch rejects with `weights_only=True`, each with the reason.
    """

    tensors: Mapping[str, Tensor] = attrs.field(repr=describe)
    values: Mapping[str, Any] = attrs.field(repr=describe)
    paths: Mapping[str, tuple[str | int, ...]] = attrs.field(repr=describe)
    refused: Mapping[str, str] = attrs.field(repr=describe)


_Read = Callable[[], Any]


def read_dcp(
    folder: StrPath, *, only: Callable[[str], bool] | None = None, strict: bool = True
) -> DcpState:
    """Read a folder that `torch.distributed.checkpoint.save` wrote, at any number of ranks.

    Args:
        folder: The folder with `.metadata`.
        only: Name → whether to read it; all by default.
        strict: Raise if torch rejects a value with `weights_only=True`. Otherwise skip such
            values and list them in `refused`.

    Effects:
        Reads the files, and keeps every requested tensor in memory. Runs no code from the
        checkpoint.

    Raises:
        CheckpointError: the folder is not such a checkpoint, or is damaged or malicious.

    Example:
        >>> from fxtrain.interop import read_dcp
        >>> read_dcp("runs/nowhere")
        Traceback (most recent call last):
        fxtrain.errors.CheckpointError: runs/nowhere contains no .metadata, ...
    """
    root = Path(folder)
    if not (root / _METADATA).is_file():
        raise CheckpointError(
            f"{root} contains no {_METADATA}, which torch.distributed.checkpoint writes last: the "
            f"checkpoint has another format or is incomplete. Pass a complete one.",
            code="FX601",
        )
    with expected_layout(root, "torch.distributed.checkpoint"):
        state = _read(root, only or (lambda name: True))
    if state.refused and strict:
        lines = [f"  {why}" for why in list(state.refused.values())[:10]]
        raise CheckpointError(
            f"{root} contains {len(state.refused)} values that torch does not load with "
            f"weights_only=True. Pass strict=False to skip them.\n" + "\n".join(lines)
        )
    return state


def _read(root: Path, only: Callable[[str], bool]) -> DcpState:
    index = load_records(read_file(inside(root, _METADATA), _MAX_BYTES), _RECORDS).fields
    records = {name: told for name, told in index["state_dict_metadata"].items() if only(name)}
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
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, record in records.items():
        if record.kind == "TensorStorageMetadata":
            tensors[name] = _tensor(record.fields, parts[name])
            continue
        (read,) = parts[name].values()
        try:
            values[name] = read()
        except CheckpointError as error:
            refused[name] = str(error)
    recorded = index.get("planner_data")
    paths = {
        name: keys
        for name, keys in (recorded.items() if isinstance(recorded, dict) else ())
        if name in records and isinstance(keys, tuple) and keys
    }
    return DcpState(tensors=tensors, values=values, paths=paths, refused=refused)


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


def _tensor(told: Mapping[str, Any], parts: Mapping[Any, _Read]) -> Tensor:
    """Assemble a full tensor from the parts that cover it."""
    shape, state = told["size"], told["properties"].state
    dtype = state["dtype"] if isinstance(state, dict) else state[0]
    boxes = [(part.fields["offsets"], part.fields["sizes"]) for part in told["chunks"]]
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


def tree_of(state: DcpState, split: Callable[[str], tuple[str, ...]]) -> dict[Any, Any]:
    """Rebuild the nested state dict that was saved.

    Args:
        state: The contents of a checkpoint.
        split: Name → keys, for names whose keys torch did not record.
    """
    tree: dict[Any, Any] = {}
    for name, value in (*state.tensors.items(), *state.values.items()):
        *keys, last = state.paths.get(name) or split(name)
        node: Any = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = value
    return tree


def lists_of(tree: Any) -> Any:
    """Turn mappings from 0, 1, … back into lists."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(type(key) is int for key in tree) and sorted(tree) == list(range(len(tree))):
        return [lists_of(tree[index]) for index in range(len(tree))]
    return {key: lists_of(value) for key, value in tree.items()}
