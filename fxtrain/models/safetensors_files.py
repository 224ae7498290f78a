"""Read and validate headers of safetensors files, and write such files tensor by tensor.

To write, the `safetensors` package needs NumPy and all tensors of a file in memory. The format is
a length, a JSON header and the bytes of the tensors, so one tensor at a time suffices.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._reading import open_file
from fxtrain._record import shown
from fxtrain.errors import CheckpointError
from fxtrain.models.tensor_bytes import DTYPE_NAMES, WRITABLE_DTYPES, contiguous, memory_of
from fxtrain.state import Location
from fxtrain.state.parsing import parse_json as parse

_MAX_BYTES = 100_000_000  # bytes of a header, the limit of the safetensors package
_MAX_DEPTH = 64  # dimensions, torch's own limit
_MOST = 1 << 63  # limit of a size or an offset
_METADATA = "__metadata__"
_ALIGNMENT = 64  # bytes; where memory is mapped, some products round differently at other addresses
_WORD = 200  # characters of a name in a message


@attrs.frozen(kw_only=True)
class Entry:
    """A tensor in a file.

    Attributes:
        name: Its name.
        dtype: Its dtype.
        shape: Its shape.
        start: Offset of its first byte from the end of the header.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@attrs.frozen(kw_only=True)
class Header:
    """A validated header: the tensors fill the file without gaps or overlaps.

    Attributes:
        entries: The tensors by name.
        metadata: Free-form metadata of the file.
        size: Bytes before the first tensor.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    size: int

    def location(self, path: Path, name: str) -> Location:
        """Where a tensor is in the file, which is at this path."""
        entry = self.entries[name]
        return Location(
            path=path.absolute(),
            start=self.size + entry.start,
            nbytes=entry.nbytes,
            dtype=entry.dtype,
            shape=entry.shape,
        )


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file, and check it against the file size.

    Effects:
        Reads only the header; allocates at most the size of the file.

    Raises:
        CheckpointError: the file does not exist, is truncated, or has an invalid header.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_BYTES):
                raise _damaged(path, f"it has {size} bytes, too few for a header of {length} bytes")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error
    table = parse_json(raw, path)
    metadata = table.pop(_METADATA, {})
    if not all(isinstance(text, str) for text in _mapping(metadata, path, _METADATA).values()):
        raise _damaged(path, f"{_METADATA} contains values that are not text")
    entries = [_entry(path, name, data) for name, data in table.items()]
    _check_layout(path, entries, size - 8 - length)
    named = {entry.name: entry for entry in entries}
    return Header(entries=named, metadata=metadata, size=8 + length)


@contextlib.contextmanager
def writing(
    path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]
) -> Iterator[Callable[[Tensor], None]]:
    """Write a new safetensors file; yields a function that writes the next tensor.

    Args:
        entries: The tensors to write, in order; their offsets are computed.
        metadata: Free-form metadata of the file.

    Effects:
        Creates the file, and flushes it to disk at the end of the block.

    Raises:
        CheckpointError: a tensor does not match its entry, or tensors are missing.
    """
    waiting = list(reversed(entries))

    def put(tensor: Tensor) -> None:
        entry = waiting.pop() if waiting else None
        if entry is None or (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            description = f"{tensor.dtype} {tuple(tensor.shape)}"
            want = "no more" if entry is None else f"{entry.name}, {entry.dtype} {entry.shape}"
            raise CheckpointError(f"{path}: expected {want}, found a tensor {description}.")
        values = contiguous(tensor)
        file.write(memory_of(values))

    with path.open("xb") as file:
        file.write(_header(path, entries, metadata))
        yield put
        if waiting:
            raise CheckpointError(f"{path}: the tensor {waiting[-1].name} was not written.")
        file.flush()
        os.fsync(file.fileno())


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object from a file; a repeated key is an error.

    Raises:
        CheckpointError: the bytes are not a JSON object.
    """
    try:
        return _mapping(parse(raw), path, "the header")
    except ValueError as error:
        raise _damaged(path, f"invalid JSON: {str(error)[:500]}") from None


def aligned_first(nbytes: int) -> int:
    """A key for sorting the tensors of a file so that each one's start is aligned.

    A tensor starts at a multiple of the largest power of two that divides its size in bytes, since
    that power divides the sizes of all tensors before it too.
    """
    return -(nbytes & -nbytes)


def to_header(
    rows: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """The first bytes of a file: the length of its header, and the header.

    Args:
        rows: (name, dtype in the format's word, shape, bytes) of each tensor, in order.
        metadata: Free words for the file.

    Returns:
        The bytes, padded so that what follows is aligned, and where each tensor ends, counted
        from the end of the header.

    Raises:
        CheckpointError: this machine is big-endian.
    """
    if sys.byteorder == "big":
        raise CheckpointError("Safetensors files are little-endian; this machine is big-endian.")
    table: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    ends: list[int] = []
    start = 0
    for name, dtype, shape, nbytes in rows:
        stop = start + nbytes
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        ends.append(stop)
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, ends


def _header(path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    seen = {_METADATA}
    for entry in entries:
        if entry.name in seen:
            raise CheckpointError(f"{path}: duplicate name {entry.name!r}. Rename the tensor.")
        if entry.name.encode("utf-8", "ignore").decode() != entry.name:
            raise CheckpointError(
                f"{path}: the name {entry.name!r} is not valid Unicode. Rename the tensor."
            )
        seen.add(entry.name)
    rows = (
        (entry.name, WRITABLE_DTYPES[entry.dtype], entry.shape, entry.nbytes) for entry in entries
    )
    return to_header(rows, metadata)[0]


def _entry(path: Path, name: str, data: Any) -> Entry:
    fields = _mapping(data, path, name)
    if set(fields) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"the tensor {shown(name)} has the fields {shown(sorted(fields))}")
    shape, offsets, dtype = fields["shape"], fields["data_offsets"], fields["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_NAMES:
        raise _damaged(path, f"the dtype {shown(dtype)} of {shown(name)} cannot be read")
    if not _counts(shape) or len(shape) > _MAX_DEPTH:
        raise _damaged(path, f"the shape of {shown(name)} is not a list of sizes")
    if not _counts(offsets) or len(offsets) != 2:
        raise _damaged(path, f"the offsets of {shown(name)} are not two positions in the file")
    entry = Entry(name=name, dtype=DTYPE_NAMES[dtype], shape=tuple(shape), start=offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise _damaged(
            path,
            f"{shown(name)} needs {entry.nbytes} bytes as {dtype} {shown(shape)}, but has the "
            f"offsets {offsets}",
        )
    return entry


def _check_layout(path: Path, entries: Sequence[Entry], size: int) -> None:
    """Check that every byte after the header belongs to exactly one tensor."""
    stop = 0
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.nbytes)):
        if entry.start != stop:
            problem = "overlaps another tensor" if entry.start < stop else "leaves a gap before it"
            raise _damaged(path, f"{shown(entry.name)} {problem}")
        stop += entry.nbytes
    if stop != size:
        raise _damaged(path, f"its tensors fill {stop} bytes, but the file has {size}")


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(number) is int and 0 <= number < _MOST for number in value
    )


def _mapping(value: Any, path: Path, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _damaged(path, f"{what[:_WORD]} is a {type(value).__name__}, not an object")
    return value


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged, or is not a safetensors file or index: {why}.", code="FX602"
    )
