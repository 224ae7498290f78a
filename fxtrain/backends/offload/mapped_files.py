"""Tensors that are used where they are in a file: mapped, not copied.

The pages of a mapping are those of the system's page cache, so they take no memory of this process,
several processes share them, and the system takes them back when memory is short. A write to such
a tensor stays in this process.
"""

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._reading import open_file
from fxtrain.errors import CheckpointError
from fxtrain.models.safetensors_files import Entry, read_header, writing
from fxtrain.state import Location

try:
    import resource
except ImportError:  # Windows
    resource = None

_POPULATE_READ = 22  # madvise: read pages and map them; an error is returned, not a signal
_PIECE = 1 << 20  # bytes read at once
_MEMORY_SPEED = 8e9  # bytes per second that no disk reaches
_ALIGNMENT = 16  # bytes; on some CPUs, products with a matrix at other addresses round differently


@attrs.frozen(kw_only=True, eq=False)
class MappedFile:
    """A file that is mapped as it was when it was opened.

    Attributes:
        path: Path of the file.
        status: Its device, inode, size and modification time.
        memory: Its bytes; the mapping ends with the last tensor that uses it.
        address: Address of the first byte.
    """

    path: Path
    status: tuple[int, ...]
    memory: mmap.mmap = attrs.field(repr=False)
    address: int


@attrs.frozen(kw_only=True, eq=False)
class Span:
    """Bytes of a file that are read as one.

    Attributes:
        file: The file.
        start: Offset of the first byte.
        stop: Offset after the last byte.
        tensors: (name, offset of its first byte) of the tensors in it, ascending.
    """

    file: MappedFile
    start: int
    stop: int
    tensors: tuple[tuple[str, int], ...]


def map_file(path: Path) -> MappedFile:
    """Map a file into memory, without reading it.

    Raises:
        CheckpointError: the file cannot be opened or mapped.
    """
    try:
        with open_file(path) as file:
            status = _status(os.fstat(file.fileno()))
            # Private: what is written to a tensor never reaches the file.
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # an empty file is a ValueError
        raise CheckpointError(f"{path} cannot be mapped into memory: {error}.") from error
    address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    return MappedFile(path=path, status=status, memory=memory, address=address)


def fits(location: Location, dtype: torch.dtype, *, exact: bool) -> bool:
    """Whether a tensor can be used where it is: dtype and alignment are as torch needs them.

    Args:
        exact: Require the alignment with which products have the bits of those in torch's memory.
    """
    needed = _ALIGNMENT if exact else min(location.dtype.itemsize, 8)
    return location.dtype == dtype and location.start % needed == 0


def mapped(file: MappedFile, location: Location) -> Tensor:
    """The tensor at a location of a file, on the CPU, without a copy."""
    if not location.nbytes:
        return torch.empty(location.shape, dtype=location.dtype, device="cpu")
    flat = torch.frombuffer(
        file.memory, dtype=torch.uint8, count=location.nbytes, offset=location.start
    )
    return flat.view(location.dtype).view(location.shape)


def spans_of(tensors: Iterable[tuple[str, MappedFile, Location]]) -> tuple[Span, ...]:
    """The bytes to read for some tensors; those next to each other are one span."""
    spans: list[Span] = []
    for name, file, place in sorted(tensors, key=_place_in_files):
        stop = place.start + place.nbytes
        last = spans[-1] if spans else None
        if last is not None and last.file is file and place.start <= last.stop:
            known = (*last.tensors, (name, place.start))
            spans[-1] = attrs.evolve(last, stop=max(stop, last.stop), tensors=known)
        elif place.nbytes:
            spans.append(
                Span(file=file, start=place.start, stop=stop, tensors=((name, place.start),))
            )
    return tuple(spans)


def _place_in_files(tensor: tuple[str, MappedFile, Location]) -> tuple[str, int]:
    _, file, location = tensor
    return str(file.path), location.start


def check(spans: Sequence[Span]) -> None:
    """Check that the files are those that were mapped.

    Raises:
        CheckpointError: a file was changed, replaced or deleted; it names the first tensor.
    """
    for span in spans:
        try:
            status = _status(os.stat(span.file.path))
        except OSError as error:
            raise _failure(span, span.start, f"{error.strerror or error}") from error
        if status != span.file.status:
            raise _failure(span, span.start, _difference(span.file.status, status))


def read(span: Span, start: int, stop: int) -> bool:
    """Bring bytes of a span into memory; other threads run meanwhile.

    Returns:
        Whether they were in memory before, as far as can be told.

    Raises:
        CheckpointError: the disk cannot be read; it names the file, the tensor and the offset.
    """
    waits, begin = disk_waits(), time.perf_counter()
    if not _populate(span.file, start, stop):
        for low in range(start, stop, _PIECE):
            _read_through(span, low, min(low + _PIECE, stop))
    elif waits is not None:  # not by the clock, which also counts waiting for Python's lock
        return disk_waits() == waits
    return (stop - start) / _MEMORY_SPEED > time.perf_counter() - begin


def disk_waits() -> int | None:
    """How often this thread had to wait for the disk in an access to memory; None if unknown."""
    if resource is None or not hasattr(resource, "RUSAGE_THREAD"):
        return None
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt


def _populate(file: MappedFile, start: int, stop: int) -> bool:
    """Read and map pages; whether that worked."""
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    advise = getattr(_LIBC, "madvise", None)
    if advise is None:
        return False
    return advise(file.address + first, stop - first, _POPULATE_READ) == 0


def _read_through(span: Span, start: int, stop: int) -> None:
    """Read into the page cache by way of a buffer, for systems that cannot populate a mapping.

    It is also what finds out why populating failed.
    """
    try:
        with open_file(span.file.path) as file:
            data = os.pread(file.fileno(), stop - start, start)
    except OSError as error:
        raise _failure(span, start, f"{error.strerror or error}") from error
    if len(data) != stop - start:
        raise _failure(span, start, f"{len(data)} of {stop - start} bytes could be read")


def _failure(span: Span, offset: int, why: str) -> CheckpointError:
    name, start = [tensor for tensor in span.tensors if tensor[1] <= offset][-1]
    return CheckpointError(
        f"{span.file.path}: the tensor {name!r} at offset {start} cannot be read: {why}. The "
        f"files of a streamed model have to stay as they were when it was wrapped. Wrap the "
        f"model again."
    )


def _difference(before: tuple[int, ...], now: tuple[int, ...]) -> str:
    if before[:2] != now[:2]:
        return "another file has taken its place"
    if before[2] != now[2]:
        return f"the file had {before[2]} bytes when it was opened, and has {now[2]} now"
    return "the file was written to since it was opened"


def _status(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _c_library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None, use_errno=True)
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    except (OSError, AttributeError, TypeError):  # not a POSIX system
        return None
    return library


_LIBC = _c_library()


_PART = ".part"  # the end of the name of a file that is being written
_ABANDONED_S = 3600.0  # without a write, after which a file is that of a killed process


def write_tensor(folder: Path, name: str, tensor: Tensor) -> Location:
    """Write a tensor to a safetensors file in the offload folder, named after its digest.

    A file that is there already is used again if its bytes still have that digest.

    Effects:
        Creates the folder. The file appears with all its bytes on disk, or not at all. Removes what
        processes that were killed while writing have left there an hour ago or more.

    Returns:
        Where the tensor is.

    Raises:
        CheckpointError: the folder cannot be written, or the disk is full.
    """
    is_new = not folder.exists()
    temporary = folder / f".{secrets.token_hex(8)}{_PART}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        entry = Entry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
        with writing(temporary, [entry], {"format": "pt"}) as put:
            put(tensor)
        digest = digest_of(temporary)
        path = folder / f"{digest}.safetensors"
        if path.exists() and digest_of(path) == digest:
            temporary.unlink()
        else:
            temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            if is_new:
                folder.rmdir()  # only if it is empty
        if not isinstance(error, OSError):
            raise
        advice = (
            "Free some space, or choose a folder on another disk"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Choose a folder that this process can write"
        )
        raise CheckpointError(
            f"Offload(offload_folder={str(folder)!r}): the {tensor.nbytes} bytes of {name!r} "
            f"cannot be written: {error.strerror or error}. {advice}."
        ) from error
    return read_header(path).location(path, name)


def _remove_abandoned(folder: Path) -> None:
    """Remove files of processes that were killed while they wrote them."""
    for path in folder.glob(f".*{_PART}"):
        with contextlib.suppress(OSError):  # another process has removed it, or may not
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                path.unlink()


def digest_of(path: Path) -> str:
    """A digest of all bytes of a file."""
    with open_file(path) as opened:
        file: Any = opened  # which reads into a buffer, too
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
