"""Read pickles of tensors with `weights_only=True`, which runs no code from them."""

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
_MAX_REASON_LENGTH = 500  # characters of torch's message


def load_weights_only(
    file: str | os.PathLike[str] | BinaryIO, what: str, *, mmap: bool = False
) -> Any:
    """Load a file onto the CPU with `torch.load(weights_only=True)`.

    Args:
        file: Path of a regular file, or a file object in memory.
        what: Description for messages.
        mmap: Map the file instead of reading it; requires a path.

    Raises:
        CheckpointError: the file cannot be opened, torch rejects it, or it is damaged.
    """
    try:
        with _opened(file) as opened:
            _check_sizes(opened)
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}.") from error
    except Exception as error:  # a damaged pickle can make torch raise anything
        raise CheckpointError(
            f"{what}: torch.load(weights_only=True{', mmap=True' if mmap else ''}) rejects it: "
            f"{_reason(error)} Files that need to run code are never read; convert a file that "
            f"you trust with torch first."
        ) from error


@contextlib.contextmanager
def _opened(file: Any) -> Iterator[BinaryIO]:
    """Open a file for inspection; a file in memory is rewound afterwards."""
    if isinstance(file, str | os.PathLike):
        with open_file(file) as opened:
            yield opened
        return
    try:
        yield file
    finally:
        file.seek(0)


def _check_sizes(file: BinaryIO) -> None:
    """Raise if an archive claims more bytes than it has, before torch allocates them."""
    if file.read(len(_ZIP)) != _ZIP:
        return
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        claimed = sum(one.file_size for one in archive.infolist())
    if claimed > size:
        raise zipfile.BadZipFile(f"its entries claim {claimed} bytes, but the file has {size}")


def _reason(error: Exception) -> str:
    """The most informative line of a message."""
    lines = str(error).strip().splitlines()
    telling = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    line = (telling or lines or [""])[0].strip()[:_MAX_REASON_LENGTH].rstrip(".")
    # The message of a KeyError is only the key.
    named = "" if isinstance(error, RuntimeError | ValueError) and line else type(error).__name__
    return f"{': '.join(filter(None, (named, line)))}."
