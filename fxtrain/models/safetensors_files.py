"""Read headers of safetensors files, and write such files tensor by tensor.

To write, the `safetensors` package needs NumPy and all tensors of a file in memory. The format is
a length, a JSON header and the bytes of the tensors, so one tensor at a time suffices.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fxtrain._reading import open_file
from fxtrain._record import shown
from fxtrain.errors import CheckpointError
from fxtrain.ops.safetensors_header import METADATA, to_header
from fxtrain.ops.tensor_bytes import DTYPE_NAMES, WRITABLE_DTYPES, contiguous, memory_of
from fxtrain.state import FileTensor
from fxtrain.state.parsing import parse_json as parse

_MAX_BYTES = 100_000_000  # bytes of a header, the limit of the safetensors package


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
    metadata = table.pop(METADATA, {})
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


def _header(path: Path, entries: Sequence[FileTensor], metadata: Mapping[str, str]) -> bytes:
    seen = {METADATA}
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
