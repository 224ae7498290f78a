"""Pickles of tensors: what torch reads with `weights_only=True`, and nothing that runs."""

import contextlib
import os
import zipfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import torch

from fxtrain._errors import CheckpointError
from fxtrain._reading import open_file

__all__ = ["load_weights_only"]

_ZIP = b"PK\x03\x04"
_MAX_REASON_LENGTH = 500  # letters of what torch says


def load_weights_only(
    file: str | os.PathLike[str] | BinaryIO, what: str, *, mmap: bool = False
) -> Any:
    """What `torch.load(weights_only=True)` makes of a file, on the CPU.

    Args:
        file: A regular file, or one in memory.
        what: What it is, for messages.
        mmap: Leave the values in the file until they are used; a path is needed for that.

    Raises:
        CheckpointError: the file cannot be opened, torch refuses it, or it is damaged.
    """
    try:
        with _opened(file) as opened:
            _check_sizes(opened)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}.") from error
    except Exception as error:  # torch does what a damaged pickle says, until something fails
        raise CheckpointError(
            f"{what}: torch.load(weights_only=True{', mmap=True' if mmap else ''}) refuses it: "
            f"{_reason(error)} A file that needs to run code is not read here; convert it where "
            f"you trust it."
        ) from error


@contextlib.contextmanager
def _opened(file: Any) -> Iterator[BinaryIO]:
    """A file to look at; one in memory is left at its beginning."""
    if isinstance(file, str | os.PathLike):
        with open_file(file) as opened:
            yield opened
        return
    try:
        yield file
    finally:
        file.seek(0)


def _check_sizes(file: BinaryIO) -> None:
    """Refuse an archive that claims more bytes than it has, before torch takes memory for them."""
    if file.read(len(_ZIP)) != _ZIP:
        return
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        claimed = sum(one.file_size for one in archive.infolist())
    if claimed > size:
        raise zipfile.BadZipFile(f"its entries claim {claimed} bytes, and the file has {size}")


def _reason(error: Exception) -> str:
    """The line of a message that says most."""
    lines = str(error).strip().splitlines()
    telling = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    line = (telling or lines or [""])[0].strip()[:_MAX_REASON_LENGTH].rstrip(".")
    # The message of a KeyError is the key alone.
    named = "" if isinstance(error, RuntimeError | ValueError) and line else type(error).__name__
    return f"{': '.join(filter(None, (named, line)))}."
