"""Tensors that are used where they are in a file: mapped, not copied.

The pages of a mapping are those of the system's page cache, so they take no memory of this process,
several processes share them, and the system takes them back when memory is short. A write to such
a tensor stays in this process.
"""

import contextlib
import ctypes
import hashlib
import mmap
import os
import secrets
import time
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain._reading import open_file
from fxtrain.errors import CheckpointError
from fxtrain.models.safetensors_files import read_header, writing
from fxtrain.state import FileTensor

try:
    import resource
except ImportError:  # Windows
    resource = None

_POPULATE_READ = 22  # madvise: read pages and map them; an error is returned, not a signal
_PIECE = 1 << 20  # bytes read at once
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


def fits(stored: FileTensor, dtype: torch.dtype, *, exact: bool) -> bool:
    """Whether a tensor can be used where it is in a file: its dtype and alignment fit.

    Args:
        exact: Require the alignment with which products have the bits of those in torch's memory.
    """
    needed = _ALIGNMENT if exact else min(stored.dtype.itemsize, 8)
    return stored.dtype == dtype and stored.start % needed == 0


def mapped(file: MappedFile, stored: FileTensor) -> Tensor:
    """A tensor of a file, on the CPU, without a copy."""
    if not stored.nbytes:
        return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    flat = torch.frombuffer(
        file.memory, dtype=torch.uint8, count=stored.nbytes, offset=stored.start
    )
    return flat.view(stored.dtype).view(stored.shape)


def check_mapping(file: MappedFile, tensor: str, start: int) -> None:
    """Check that a file is the one that was mapped.

    Args:
        tensor: The name of a tensor in it, for messages.
        start: Offset of its first byte.

    Raises:
        CheckpointError: the file was changed, replaced or deleted.
    """
    try:
        status = _status(os.stat(file.path))
    except OSError as error:
        raise _failure(file, tensor, start, f"{error.strerror or error}") from error
    if status != file.status:
        raise _failure(file, tensor, start, "the file was changed or replaced since it was opened")


def unchanged(file: MappedFile) -> bool:
    """Whether a file is the one that was mapped."""
    try:
        return _status(os.stat(file.path)) == file.status
    except OSError:
        return False


def read(file: MappedFile, tensor: str, start: int, stop: int) -> None:
    """Bring bytes of a tensor into memory; other threads run meanwhile.

    Raises:
        CheckpointError: the disk cannot be read; it names the file, the tensor and the offset.
    """
    if _populate(file, start, stop):
        return
    # By way of a buffer, for systems that cannot populate a mapping. It is also what finds out
    # why populating failed.
    for low in range(start, stop, _PIECE):
        size = min(_PIECE, stop - low)
        try:
            with open_file(file.path) as opened:
                data = os.pread(opened.fileno(), size, low)
        except OSError as error:
            raise _failure(file, tensor, low, f"{error.strerror or error}") from error
        if len(data) != size:
            raise _failure(file, tensor, low, f"{len(data)} of {size} bytes could be read")


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


def _failure(file: MappedFile, tensor: str, offset: int, why: str) -> CheckpointError:
    return CheckpointError(
        f"{file.path}: the tensor {tensor!r} at offset {offset} cannot be read: {why}. The "
        f"files of a streamed model have to stay as they were when it was wrapped. Wrap the "
        f"model again."
    )


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


def write_tensor(folder: Path, name: str, tensor: Tensor) -> tuple[Path, FileTensor]:
    """Write a tensor to a safetensors file in the offload folder, named after its digest.

    A file that is there already is used again if its bytes still have that digest.

    Effects:
        Creates the folder. The file appears with all its bytes on disk, or not at all. Removes what
        processes that were killed while writing have left there an hour ago or more.

    Returns:
        The file, and the tensor in it.

    Raises:
        CheckpointError: the folder cannot be written, or the disk is full.
    """
    temporary = folder / f".{secrets.token_hex(8)}{_PART}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        entry = FileTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
        with writing(temporary, [entry], {"format": "pt"}) as put:
            put(tensor)
        digest = digest_of(temporary)
        path = folder / f"{digest}.safetensors"
        try:
            # Fails if there is one, which other ranks may have mapped, so that it has to stay.
            os.link(temporary, path)
        except OSError:  # or where the file system has no links
            if not path.exists() or digest_of(path) != digest:
                temporary.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"Offload(offload_folder={str(folder)!r}): the {tensor.nbytes} bytes of {name!r} "
            f"cannot be written: {error.strerror or error}. Free some space, or choose a folder "
            f"that this process can write."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
            folder.rmdir()  # only if it is empty
    return path, read_header(path)[0][name]


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
