"""Writing units to the offload folder, so that they can be mapped from there."""

import contextlib
import errno
import hashlib
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fxtrain._reading import open_file
from fxtrain.errors import CheckpointError
from fxtrain.models.safetensors_files import Entry, aligned_first, read_header, writing
from fxtrain.state import Location

_PART = ".part"  # the end of the name of a file that is being written
_ABANDONED_S = 3600.0  # without a write, after which a file is that of a killed process


def write_unit(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, Location]:
    """Write tensors to a safetensors file in the offload folder, named after its digest.

    A file that is there already is used again if its bytes still have that digest.

    Effects:
        Creates the folder. The file appears with all its bytes on disk, or not at all. Removes what
        processes that were killed while writing have left there an hour ago or more.

    Returns:
        Where each tensor is.

    Raises:
        CheckpointError: the folder cannot be written, or the disk is full.
    """
    made = False
    temporary = None
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        temporary = folder / f".{secrets.token_hex(8)}{_PART}"
        ordered = dict(sorted(tensors.items(), key=lambda pair: aligned_first(pair[1].nbytes)))
        entries = [
            Entry(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
            for name, tensor in ordered.items()
        ]
        with writing(temporary, entries, {"format": "pt"}) as put:
            for tensor in ordered.values():
                put(tensor)
        digest = digest_of(temporary)
        path = folder / f"{digest}.safetensors"
        if _is_same(path, digest):
            temporary.unlink()
        else:
            temporary.replace(path)
    except OSError as error:
        _remove(temporary, folder if made else None)
        raise _refusal(folder, tensors, error) from error
    except BaseException:
        _remove(temporary, folder if made else None)
        raise
    header = read_header(path)
    return {name: header.location(path, name) for name in header.entries}


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


def _is_same(path: Path, digest: str) -> bool:
    try:
        return digest_of(path) == digest
    except OSError:
        return False


def _remove(temporary: Path | None, folder: Path | None) -> None:
    with contextlib.suppress(OSError):
        if temporary is not None:
            temporary.unlink()
    with contextlib.suppress(OSError):
        if folder is not None:
            folder.rmdir()  # only if it is empty


def _refusal(folder: Path, tensors: Mapping[str, Tensor], error: OSError) -> CheckpointError:
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    what = f"the {nbytes} bytes of {next(iter(tensors), 'a unit')!r} and others"
    advice = (
        "Free some space, or choose a folder on another disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "Choose a folder that this process can write"
    )
    return CheckpointError(
        f"Offload(offload_folder={str(folder)!r}): {what} cannot be written: "
        f"{error.strerror or error}. {advice}."
    )
