"""The interface of a checkpoint folder, local or remote."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import attrs

from fxtrain.errors import CheckpointError

# Errors that mean "does not exist" or "is not a plain file" rather than "reading failed".
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG}


class UnreadableError(CheckpointError):
    """Reading was refused or failed; the stored data may be intact."""

    code = "FX607"


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise `UnreadableError` if reading fails; an absent file stays an `OSError`."""
    try:
        yield
    except OSError as error:
        if error.errno in _ABSENT or isinstance(error, FileNotFoundError):
            raise
        raise UnreadableError(
            f"{what} cannot be read: {error.strerror or error}. It may be intact: try again once "
            f"it is readable."
        ) from error


class Writer(Protocol):
    """A file being written; closing it makes the bytes durable."""

    def write(self, data: memoryview, /) -> Any:
        """Add bytes."""
        ...


class Storage(Protocol):
    """A folder that contains checkpoints, or the files of one."""

    @property
    def name(self) -> str:
        """Its name in the folder that contains it."""
        ...

    def join(self, name: str) -> "Storage":
        """Return a folder inside this one."""
        ...

    def begin(self, name: str, token: str) -> "Storage":
        """Return the draft that `commit` turns into the folder `name`; equal on every rank."""
        ...

    def make(self) -> None:
        """Create the folder and its parents."""
        ...

    def commit(self, name: str, token: str, manifest: bytes) -> None:
        """Write the manifest and make the draft appear as the folder `name`."""
        ...

    def folders(self) -> list[str]:
        """Names of the folders inside that are not temporary; none if it does not exist."""
        ...

    def leftovers(self) -> list[str]:
        """Names of drafts that were never committed."""
        ...

    def files(self) -> dict[str, int]:
        """Size of every file, by name; -1 if it is not a plain file.

        Raises:
            FileNotFoundError: the folder does not exist.
            UnreadableError: it cannot be read. All methods that read may raise this.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a folder inside this one."""
        ...

    def read(self, name: str, most: int) -> bytes:
        """The bytes of a file; an error if there are more than `most`."""
        ...

    def open(self, name: str) -> Any:
        """A context manager of a function (offset, buffer) that fills the buffer."""
        ...

    def create(self, name: str) -> Any:
        """A context manager of a `Writer` for a new file."""
        ...

    def key(self) -> str:
        """A key that is equal for all paths to the same folder."""
        ...

    def locks(self) -> list[str]:
        """Names of the locks on this folder."""
        ...

    def lock(self, name: str, data: bytes) -> None:
        """Create a lock that contains some bytes, atomically.

        Raises:
            FileExistsError: a lock of that name exists.
        """
        ...

    def locked(self, name: str) -> bytes | None:
        """The bytes of a lock; None if it does not exist."""
        ...

    def refresh_lock(self, name: str, data: bytes) -> None:
        """Replace the bytes of a lock by the same number of bytes."""
        ...

    def unlock(self, name: str) -> None:
        """Remove a lock; does nothing if it does not exist."""
        ...


@attrs.frozen
class CompleteWriter:
    """Writes all bytes, although a call to the operating system may write only some."""

    file: Any

    def write(self, data: memoryview) -> None:
        while data:
            data = data[self.file.write(data) :]
