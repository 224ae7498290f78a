"""Read checkpoints of torch.distributed.checkpoint without trusting their pickles.

The index of such a checkpoint, `.metadata`, is a pickle of torch's records. It is read into inert
placeholder classes, and every number in it is validated before use.
"""

import io
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import attrs
import torch
from torch import Tensor

from fxtrain._display import describe
from fxtrain._reading import StrPath, open_file, read_file
from fxtrain._record import shown
from fxtrain.checkpoint.manifest import is_partition
from fxtrain.errors import CheckpointError
from fxtrain.models.pickles import Placeholder, load_records, load_weights_only
from fxtrain.models.tensor_sources import inside

_METADATA = ".metadata"
_MAX_BYTES = 1_000_000_000  # bytes of an index
_MOST = 1 << 63  # limit of a size or an offset
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
_MAX_REASON_LENGTH = 500  # characters of an unpickling error


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


@attrs.frozen(kw_only=True)
class _Chunk:
    """Location of a value or of a part of a tensor: in the full tensor, and in a file."""

    name: str
    offsets: tuple[int, ...] | None
    file: str
    start: int
    length: int


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
    path = inside(root, _METADATA)
    index = _read_index(path)
    kinds = _table(path, index, "state_dict_metadata")
    wanted = {name: record for name, record in kinds.items() if only is None or only(name)}
    chunks: dict[str, list[_Chunk]] = {name: [] for name in wanted}
    for chunk in _chunks(path, index):
        if chunk.name in chunks:
            chunks[chunk.name].append(chunk)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, record in wanted.items():
        if record.kind == "TensorStorageMetadata":
            tensors[name] = _tensor(root, name, record, chunks[name])
            continue
        if len(chunks[name]) != 1:
            raise _damaged(root, f"the value {shown(name)} is stored {len(chunks[name])} times")
        data = _bytes(root, chunks[name][0])
        try:
            values[name] = load_weights_only(io.BytesIO(data), name)
        except CheckpointError as error:
            refused[name] = str(error)
    if refused and strict:
        lines = [f"  {why}" for why in list(refused.values())[:10]]
        raise CheckpointError(
            f"{root} contains {len(refused)} values that torch does not load with "
            f"weights_only=True. Pass strict=False to skip them.\n" + "\n".join(lines)
        )
    recorded = index.fields.get("planner_data")
    paths = {
        name: keys
        for name, keys in (recorded.items() if isinstance(recorded, dict) else ())
        if name in wanted and isinstance(keys, tuple) and keys
        if all(isinstance(key, str | int) for key in keys)
    }
    return DcpState(tensors=tensors, values=values, paths=paths, refused=refused)


def _read_index(path: Path) -> Placeholder:
    try:
        raw = read_file(path, _MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error
    try:
        index = load_records(raw, _RECORDS)
    except Exception as error:  # a damaged pickle may raise anything
        raise _damaged(
            path, f"{type(error).__name__}: {str(error)[:_MAX_REASON_LENGTH]}"
        ) from error
    if getattr(index, "kind", None) != "Metadata":
        raise _damaged(path, "it is not a pickle of Metadata")
    return index


def _chunks(path: Path, index: Placeholder) -> list[_Chunk]:
    chunks: list[_Chunk] = []
    for key, info in _table(path, index, "storage_data", kind="MetadataIndex").items():
        what, where = key.fields, info.fields
        name, offsets = what.get("fqn"), what.get("offset")
        file, span = where.get("relative_path"), (where.get("offset"), where.get("length"))
        if not isinstance(name, str) or not isinstance(file, str):
            raise _damaged(path, "an entry has no name or no file")
        if offsets is not None and not _counts(offsets):
            raise _damaged(path, f"the offsets of {shown(name)} are not valid offsets in a tensor")
        if not _counts(span):
            raise _damaged(path, f"{shown(name)} has no valid location in {shown(file)}")
        if where.get("transform_descriptors"):
            raise CheckpointError(
                f"{path}: {shown(name)} is stored with {shown(where['transform_descriptors'])}, "
                f"which only torch can undo. Save the checkpoint again without it."
            )
        start, length = span
        chunks.append(_Chunk(name=name, offsets=offsets, file=file, start=start, length=length))
    return chunks


def _tensor(root: Path, name: str, record: Placeholder, chunks: list[_Chunk]) -> Tensor:
    """Assemble a full tensor, allocated after checking that its parts fill it."""
    size, dtype = record.fields.get("size"), _dtype(record.fields.get("properties"))
    parts = record.fields.get("chunks")
    if not _counts(size) or dtype is None or not isinstance(parts, list):
        raise _damaged(root, f"the index does not describe the tensor {shown(name)}")
    sizes = _places(root, name, parts, size)
    by_offsets = {chunk.offsets: chunk for chunk in chunks}
    if by_offsets.keys() != sizes.keys():
        raise _damaged(root, f"the parts of {shown(name)} do not fill its shape {shown(size)}")
    if math.prod(size) * dtype.itemsize > sum(chunk.length for chunk in chunks):
        raise _damaged(root, f"{shown(name)} is larger in the index than its parts in the files")
    data = {offsets: _bytes(root, chunk) for offsets, chunk in by_offsets.items()}
    full = torch.empty(size, dtype=dtype, device="cpu")
    for offsets, extent in sizes.items():
        part = load_weights_only(io.BytesIO(data.pop(offsets)), f"{root}: {name}")
        kind = (getattr(part, "dtype", None), tuple(getattr(part, "shape", ())))
        if not isinstance(part, Tensor) or kind != (dtype, extent):
            raise _damaged(root, f"a part of {shown(name)} does not match the index")
        target = full
        for dim, (start, length) in enumerate(zip(offsets, extent, strict=True)):
            target = target.narrow(dim, start, length)
        target.copy_(part)
    return full


def _bytes(root: Path, chunk: _Chunk) -> bytes:
    path = inside(root, chunk.file)
    try:
        with open_file(path) as file:
            if chunk.start + chunk.length > os.fstat(file.fileno()).st_size:
                raise _damaged(root, f"{shown(chunk.name)} is past the end of {chunk.file}")
            file.seek(chunk.start)
            return file.read(chunk.length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error


def _places(root: Path, name: str, parts: list[Any], size: tuple[int, ...]) -> dict[Any, Any]:
    """The extent of each part of a tensor, by its offsets; the parts fill its shape."""
    sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for part in parts:
        fields = part.fields if isinstance(part, Placeholder) else {}
        offsets, extent = fields.get("offsets"), fields.get("sizes")
        if not _counts(offsets) or not _counts(extent) or len(offsets) != len(extent):
            raise _damaged(root, f"a part of {shown(name)} has no valid offsets")
        sizes[offsets] = extent
    within = all(
        len(offsets) == len(size)
        and all(o + e <= s for o, e, s in zip(offsets, extent, size, strict=True))
        for offsets, extent in sizes.items()
    )
    if not within or not is_partition(size, [*sizes.items()]):
        raise _damaged(root, f"the parts of {shown(name)} do not fill its shape {shown(size)}")
    return sizes


def _dtype(properties: Any) -> torch.dtype | None:
    state = getattr(properties, "state", None)
    dtype = state[0] if isinstance(state, tuple) and state else None
    dtype = state.get("dtype") if isinstance(state, dict) else dtype
    return dtype if isinstance(dtype, torch.dtype) else None


def _table(
    path: Path, index: Placeholder, field: str, kind: str | None = None
) -> dict[Any, Placeholder]:
    """A field that maps names, or records of one type, to records."""
    table = index.fields.get(field)
    if not isinstance(table, dict) or not all(
        isinstance(value, Placeholder)
        and (isinstance(key, str) if kind is None else getattr(key, "kind", None) == kind)
        for key, value in table.items()
    ):
        raise _damaged(path, f"its {field} is not a table of records")
    return table


def tree_of(root: Path, state: DcpState, split: Callable[[str], tuple[str, ...]]) -> dict[Any, Any]:
    """Rebuild the nested state dict that was saved.

    Args:
        root: The folder, for messages.
        state: The contents read from it.
        split: Name → keys, for names whose keys torch did not record.

    Raises:
        CheckpointError: a name is nested inside the value of another.
    """
    tree: dict[Any, Any] = {}
    for name, value in (*state.tensors.items(), *state.values.items()):
        *keys, last = state.paths.get(name) or split(name)
        node: Any = tree
        for key in keys:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node:
            raise CheckpointError(f"{root}: {shown(name)} is nested inside another value.")
        node[last] = value
    return tree


def _counts(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(
        type(number) is int and 0 <= number < _MOST for number in value
    )


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged, or is not a valid checkpoint: {why}.", code="FX602")
