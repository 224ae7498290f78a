"""What a folder of checkpoints can do, wherever it lies."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import attrs

from fxtrain._errors import CheckpointError

__all__ = ["CompleteWriter", "Storage", "UnreadableError", "Writer", "reading"]

# What is not there, or is no plain file: that is known of it, and not that reading failed.
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG}


class UnreadableError(CheckpointError):
    """The system refuses to read, or fails to: what is stored may be whole."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Tell what cannot be read from what is not there, which stays the system's error."""
    try:
        yield
    except OSError as error:
        if error.errno in _ABSENT or isinstance(error, FileNotFoundError):
            raise
        raise UnreadableError(
            f"{what} cannot be read: {error.strerror or error}. It may be whole: try again once "
            f"it can be read."
        ) from error


class Writer(Protocol):
    """A file being written; closing it makes the bytes durable."""

    def write(self, data: memoryview, /) -> Any:
        """Add bytes."""
        ...


class Storage(Protocol):
    """A folder that holds checkpoints, or files of one."""

    def join(self, name: str) -> "Storage":
        """A folder inside this one."""
        ...

    def begin(self, name: str, token: str) -> "Storage":
        """Where to write what will be the folder `name`; equal on every rank."""
        ...

    def make(self) -> None:
        """Make the folder and its parents."""
        ...

    def commit(self, name: str, token: str, manifest: bytes) -> None:
        """Write the manifest and make the draft appear as the folder `name`."""
        ...

    def folders(self) -> list[str]:
        """Names of the folders inside that are not temporary; none if it is not there."""
        ...

    def leftovers(self) -> list[str]:
        """Names of drafts that were never committed."""
        ...

    def files(self) -> dict[str, int]:
        """Size of every file, by name; -1 for what is not a plain file.

        Raises:
            FileNotFoundError: the folder is not there.
            UnreadableError: it cannot be read; as with all functions here that read.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a folder inside this one."""
        ...

    def read(self, name: str, most: int) -> bytes:
        """A whole file; an error if it is larger than `most` bytes."""
        ...

    def open(self, name: str) -> Any:
        """A context manager of a function (offset, buffer) that fills the buffer."""
        ...

    def create(self, name: str) -> Any:
        """A context manager of a `Writer` for a new file."""
        ...

    def key(self) -> str:
        """Equal for the same folder, by whatever path it was reached."""
        ...

    def locks(self) -> list[str]:
        """Names of the locks on this folder."""
        ...

    def lock(self, name: str, data: bytes) -> None:
        """Create a lock that holds some bytes, whole or not at all.

        Raises:
            FileExistsError: there is one of that name.
        """
        ...

    def locked(self, name: str) -> bytes | None:
        """What a lock holds; None if it is not there."""
        ...

    def refresh_lock(self, name: str, data: bytes) -> None:
        """Replace what a lock holds by as many bytes."""
        ...

    def unlock(self, name: str) -> None:
        """Remove a lock; nothing happens if it is not there."""
        ...


@attrs.frozen
class CompleteWriter:
    """Writes all of it: the operating system may take a part and say so."""

    file: Any

    def write(self, data: memoryview) -> None:
        while data:
            data = data[self.file.write(data) :]
