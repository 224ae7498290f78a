"""Reading a checkpoint of torch.distributed.checkpoint, without believing its pickle.

The index of such a checkpoint, `.metadata`, is a pickle of torch's own records. Here it is read
into stand-ins that can do nothing, and every number in it is checked before it is used.
"""

import io
import itertools
import math
import os
import pickle
import pickletools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import attrs
import torch
from torch import Tensor

from fxtrain._errors import CheckpointError
from fxtrain._reading import open_file, read_file
from fxtrain.models.pickles import load_weights_only
from fxtrain.models.tensor_sources import inside
from fxtrain.state import shown

__all__ = ["DcpState", "read_dcp", "tree_of"]

_METADATA = ".metadata"
_MAX_BYTES = 1_000_000_000  # bytes of an index
_MOST = 1 << 63  # of a size or a place
_RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
        "TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING"
    ),
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
}
# Opcodes that torch's index has no use for, and those that name a place in the memo.
_NEVER = ("BYTEARRAY8", "NEXT_BUFFER", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "INST", "OBJ")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT")
_MAX_REASON_LENGTH = 500  # letters of what a pickle says when it fails
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")


@attrs.frozen(kw_only=True, eq=False)
class DcpState:
    """What a checkpoint of torch.distributed.checkpoint holds.

    Attributes:
        tensors: Whole tensors by name, on the CPU.
        values: Everything else by name: numbers, text, and containers of them.
        paths: For each name, its keys in the state dict that was saved, where torch noted them.
        refused: For each value that torch does not load with `weights_only=True`, why.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    paths: Mapping[str, tuple[str | int, ...]]
    refused: Mapping[str, str]


@attrs.frozen(kw_only=True)
class _Chunk:
    """Where a value or a part of a tensor lies: its place in the whole, and in a file."""

    name: str
    offsets: tuple[int, ...] | None
    file: str
    start: int
    length: int


def read_dcp(
    folder: Any, *, only: Callable[[str], bool] | None = None, strict: bool = True
) -> DcpState:
    """Read a folder that `torch.distributed.checkpoint.save` wrote, at any number of ranks.

    Args:
        folder: The folder with `.metadata`.
        only: Whether to read the value of a name; all of them by default.
        strict: Refuse a checkpoint with values that torch does not load with
            `weights_only=True`. Otherwise they are left out, and listed in `refused`.

    Effects:
        Reads the files, and holds every tensor that was asked for in memory. No code from the
        checkpoint runs.

    Raises:
        CheckpointError: the folder is no such checkpoint, or it is damaged or hostile.

    Example:
        >>> from fxtrain.interop import read_dcp
        >>> read_dcp("runs/nowhere")
        Traceback (most recent call last):
        fxtrain._errors.CheckpointError: runs/nowhere holds no .metadata, ...
    """
    root = Path(folder)
    if not (root / _METADATA).is_file():
        raise CheckpointError(
            f"{root} holds no {_METADATA}, which torch.distributed.checkpoint writes last: the "
            f"checkpoint is another kind, or was never finished."
        )
    path = inside(root, _METADATA)
    index = _read_index(path)
    kinds = _table(path, index, "state_dict_metadata")
    wanted = {name: told for name, told in kinds.items() if only is None or only(name)}
    chunks: dict[str, list[_Chunk]] = {name: [] for name in wanted}
    for chunk in _chunks(path, index):
        if chunk.name in chunks:
            chunks[chunk.name].append(chunk)
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, told in wanted.items():
        if told.kind == "TensorStorageMetadata":
            tensors[name] = _tensor(root, name, told, chunks[name])
            continue
        data = _only_one(root, name, chunks[name])
        try:
            values[name] = load_weights_only(io.BytesIO(data), name)
        except CheckpointError as error:
            refused[name] = str(error)
    if refused and strict:
        lines = [f"  {why}" for why in list(refused.values())[:10]]
        raise CheckpointError(
            f"{root} holds {len(refused)} values that torch does not load with "
            f"weights_only=True. Pass strict=False to leave them out.\n" + "\n".join(lines)
        )
    paths = _paths(index.fields.get("planner_data"), wanted)
    return DcpState(tensors=tensors, values=values, paths=paths, refused=refused)


class _Record:
    """Stands for an object of the pickle: its kind, and what was said of it."""

    kind = ""
    state: Any = None

    def __init__(self, *_: Any) -> None:
        """Take what an enumeration or a path is made of, which nothing here needs."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> dict[str, Any]:
        return self.state if isinstance(self.state, dict) else {}


class _Unpickler(pickle.Unpickler):
    """Knows the records of torch's index by name, and makes none of them.

    Its classes are made anew for each pickle, so that nothing a pickle does to them lasts.
    """

    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, "").split():
            return type(name, (_Record,), {"kind": name})
        if module.split(".")[0] == "pathlib" and name in _PATHS:
            return type(name, (_Record,), {"kind": name})
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch.serialization", "_get_layout"):
            return lambda layout: layout
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _read_index(path: Path) -> _Record:
    try:
        raw = read_file(path, _MAX_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error
    try:
        _check_opcodes(raw)
        found = _Unpickler(io.BytesIO(raw)).load()
    except Exception as error:  # a damaged pickle raises whatever it happens to call
        raise _damaged(
            path, f"{type(error).__name__}: {str(error)[:_MAX_REASON_LENGTH]}"
        ) from error
    if getattr(found, "kind", None) != "Metadata":
        raise _damaged(path, "it is a pickle of something else")
    return found


def _check_opcodes(raw: bytes) -> None:
    """Refuse a pickle that has memory taken for more than it holds, before it is run.

    The memo becomes as long as its largest index, and a byte array as long as it says.
    """
    for count, (opcode, argument, place) in enumerate(pickletools.genops(raw)):
        if opcode.name in _NEVER:
            raise pickle.UnpicklingError(f"it uses {opcode.name} at {place}")
        if opcode.name in _PUTS and not 0 <= int(argument or 0) <= count:
            raise pickle.UnpicklingError(f"it stores number {argument} at {place}, out of order")


def _chunks(path: Path, index: _Record) -> list[_Chunk]:
    found: list[_Chunk] = []
    for key, info in _table(path, index, "storage_data", kind="MetadataIndex").items():
        said, where = key.fields, info.fields
        name, offsets = said.get("fqn"), said.get("offset")
        file, place = where.get("relative_path"), (where.get("offset"), where.get("length"))
        if not isinstance(name, str) or not isinstance(file, str):
            raise _damaged(path, "an entry has no name or no file")
        if offsets is not None and not _counts(offsets):
            raise _damaged(path, f"the offsets of {shown(name)} are not places in a tensor")
        if not _counts(place):
            raise _damaged(path, f"{shown(name)} does not say where it lies in {shown(file)}")
        if where.get("transform_descriptors"):
            raise CheckpointError(
                f"{path}: {shown(name)} is stored with {shown(where['transform_descriptors'])}, "
                f"which only torch can undo. Save the checkpoint again without it."
            )
        start, length = place
        found.append(_Chunk(name=name, offsets=offsets, file=file, start=start, length=length))
    return found


def _tensor(root: Path, name: str, told: _Record, chunks: list[_Chunk]) -> Tensor:
    """A whole tensor from its parts, allocated once it is known that they fill it."""
    size, dtype = told.fields.get("size"), _dtype(told.fields.get("properties"))
    parts = told.fields.get("chunks")
    if not _counts(size) or dtype is None or not isinstance(parts, list):
        raise _damaged(root, f"the index does not describe the tensor {shown(name)}")
    sizes = _places(root, name, parts)
    held = {chunk.offsets: chunk for chunk in chunks}
    if held.keys() != sizes.keys() or not _fills(sizes, size):
        raise _damaged(root, f"the parts of {shown(name)} do not make up its shape {shown(size)}")
    if math.prod(size) * dtype.itemsize > sum(chunk.length for chunk in chunks):
        raise _damaged(root, f"{shown(name)} is said to be larger than its parts in the files")
    data = {offsets: _bytes(root, chunk) for offsets, chunk in held.items()}
    whole = torch.empty(size, dtype=dtype)
    for offsets, extent in sizes.items():
        part = load_weights_only(io.BytesIO(data.pop(offsets)), f"{root}: {name}")
        kind = (getattr(part, "dtype", None), tuple(getattr(part, "shape", ())))
        if not isinstance(part, Tensor) or kind != (dtype, extent):
            raise _damaged(root, f"a part of {shown(name)} is not what the index says of it")
        target = whole
        for dim, (start, length) in enumerate(zip(offsets, extent, strict=True)):
            target = target.narrow(dim, start, length)
        target.copy_(part)
    return whole


def _only_one(root: Path, name: str, chunks: list[_Chunk]) -> bytes:
    if len(chunks) != 1:
        raise _damaged(root, f"the value {shown(name)} is in {len(chunks)} places")
    return _bytes(root, chunks[0])


def _bytes(root: Path, chunk: _Chunk) -> bytes:
    path = inside(root, chunk.file)
    try:
        with open_file(path) as file:
            if chunk.start + chunk.length > os.fstat(file.fileno()).st_size:
                raise _damaged(root, f"{shown(chunk.name)} lies beyond the end of {chunk.file}")
            file.seek(chunk.start)
            return file.read(chunk.length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error


def _places(root: Path, name: str, parts: list[Any]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The extent of each part of a tensor by where it starts."""
    sizes: dict[tuple[int, ...], tuple[int, ...]] = {}
    for part in parts:
        told = part.fields if isinstance(part, _Record) else {}
        offsets, extent = told.get("offsets"), told.get("sizes")
        if not _counts(offsets) or not _counts(extent) or len(offsets) != len(extent):
            raise _damaged(root, f"a part of {shown(name)} has no place")
        sizes[offsets] = extent
    return sizes


def _fills(parts: Mapping[tuple[int, ...], tuple[int, ...]], size: tuple[int, ...]) -> bool:
    """Whether boxes lie inside a shape and cover each of its entries once."""
    for offsets, extent in parts.items():
        if len(offsets) != len(size):
            return False
        if any(o + e > s for o, e, s in zip(offsets, extent, size, strict=True)):
            return False
    if sum(math.prod(extent) for extent in parts.values()) != math.prod(size):
        return False
    boxes = sorted((offsets, extent) for offsets, extent in parts.items() if math.prod(extent))
    if all(extent[1:] == size[1:] for _, extent in boxes):  # rows, as nearly always
        return all(one[0][0] + one[1][0] <= two[0][0] for one, two in itertools.pairwise(boxes))
    return not any(
        all(a < b + n and b < a + m for a, m, b, n in zip(*one, *two, strict=True))
        for place, one in enumerate(boxes)
        for two in boxes[:place]
    )


def _dtype(properties: Any) -> torch.dtype | None:
    state = getattr(properties, "state", None)
    found = state[0] if isinstance(state, tuple) and state else None
    found = state.get("dtype") if isinstance(state, dict) else found
    return found if isinstance(found, torch.dtype) else None


def _table(path: Path, index: _Record, field: str, kind: str | None = None) -> dict[Any, _Record]:
    """A field that maps names, or records of a kind, to records."""
    table = index.fields.get(field)
    if not isinstance(table, dict) or not all(
        isinstance(value, _Record)
        and (isinstance(key, str) if kind is None else getattr(key, "kind", None) == kind)
        for key, value in table.items()
    ):
        raise _damaged(path, f"its {field} is not a table of what it holds")
    return table


def _paths(data: Any, names: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]]:
    if not isinstance(data, dict):
        return {}
    return {
        name: keys
        for name, keys in data.items()
        if name in names
        and isinstance(keys, tuple)
        and keys
        and all(isinstance(key, str | int) for key in keys)
    }


def tree_of(root: Path, state: DcpState, split: Callable[[str], tuple[str, ...]]) -> dict[Any, Any]:
    """The nested state dict that was saved.

    Args:
        root: The folder, for messages.
        state: What was read from it.
        split: The keys of a name for which torch noted none.

    Raises:
        CheckpointError: a name lies inside the value of another.
    """
    tree: dict[Any, Any] = {}
    for name, value in (*state.tensors.items(), *state.values.items()):
        *keys, last = state.paths.get(name) or split(name)
        node: Any = tree
        for key in keys:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node:
            raise CheckpointError(f"{root}: {shown(name)} lies inside another value.")
        node[last] = value
    return tree


def _counts(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(type(one) is int and 0 <= one < _MOST for one in value)


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged, or no checkpoint that can be trusted: {why}.")
