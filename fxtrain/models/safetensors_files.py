"""Read headers of safetensors files, and write such files tensor by tensor.

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

from torch import Tensor

from fxtrain._reading import open_file
from fxtrain._record import shown
from fxtrain.errors import CheckpointError
from fxtrain.models.tensor_bytes import DTYPE_NAMES, WRITABLE_DTYPES, contiguous, memory_of
from fxtrain.state import FileTensor
from fxtrain.state.parsing import parse_json as parse

_MAX_BYTES = 100_000_000  # bytes of a header, the limit of the safetensors package
_METADATA = "__metadata__"
_ALIGNMENT = 64  # bytes; where memory is mapped, some products round differently at other addresses


def read_header(path: Path) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Read the header of a safetensors file, and check it against the size of the file.

    Returns the tensors by name, which fill the file without gaps or overlaps; and its metadata.
    """
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size - 8
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if length <= min(size, _MAX_BYTES) else b""
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}.") from error
    table = parse_json_object(raw, path)
    metadata = table.pop(_METADATA, {})
    entries: dict[str, FileTensor] = {}
    stop = 0  # from the end of the header
    try:
        if {*map(type, metadata.values())} - {str}:
            raise ValueError("its metadata contains values that are not text")
        for name, fields in sorted(table.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = fields["data_offsets"]
            entry = FileTensor(
                name=name,
                dtype=DTYPE_NAMES[fields["dtype"]],
                shape=(*fields["shape"],),
                path=path.absolute(),
                start=8 + length + stop,
            )
            # Every byte belongs to one tensor.
            if (start, end - start) != (stop, entry.nbytes) or min(entry.shape, default=0) < 0:
                raise ValueError(f"{shown(name)} does not have the offsets {start} to {end}")
            entries[name], stop = entry, end
        if stop != size - length or {type(n) for e in entries.values() for n in e.shape} - {int}:
            raise ValueError(f"its tensors have {stop} bytes, and the file {size - length}")
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {str(error)[:500]}") from error
    return entries, metadata


@contextlib.contextmanager
def writing(
    path: Path, entries: Sequence[FileTensor], metadata: Mapping[str, str]
) -> Iterator[Callable[[Tensor], None]]:
    """Write a new safetensors file; yields a function that writes the next of these tensors.

    Their offsets are computed. The file is flushed to disk at the end of the block, where all of
    them have to be written.
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


def parse_json_object(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object from a file; a repeated key is an error."""
    try:
        table = parse(raw)
    except ValueError as error:
        raise _damaged(path, f"invalid JSON: {str(error)[:500]}") from None
    if not isinstance(table, dict):
        raise _damaged(path, f"it contains a {type(table).__name__}, not an object")
    return table


def aligned_first(nbytes: int) -> float:
    """A key for sorting the tensors of a file so that each one's start is aligned.

    A tensor starts at a multiple of the largest power of two that divides its size in bytes, since
    that power divides the sizes of all tensors before it too. Every power divides 0.
    """
    return -(nbytes & -nbytes) or -math.inf


def to_header(
    rows: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """The first bytes of a file: the length of its header, and the header.

    `rows` has name, dtype in the format's word, shape and bytes of each tensor, in order. The bytes
    are padded so that what follows is aligned. Also returns where each tensor ends, counted from
    the end of the header.
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


def _header(path: Path, entries: Sequence[FileTensor], metadata: Mapping[str, str]) -> bytes:
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


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged, or is not a safetensors file or index: {why}.", code="FX602"
    )
