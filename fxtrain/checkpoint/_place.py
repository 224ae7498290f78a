"""Where checkpoints lie: local folders, and whatever fsspec reaches.

A checkpoint appears all at once. On a local file system it is written to a temporary folder
that is renamed; elsewhere, where a rename is not atomic, its manifest is written last, and a
folder without one is no checkpoint.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import attrs

from fxtrain._errors import CheckpointError
from fxtrain._optional import optional
from fxtrain._paths import path_problem
from fxtrain.checkpoint._manifest import MANIFEST

__all__ = ["Place", "place_of"]

_TEMPORARY = ".partial-"
_EARLY = 32 << 20  # bytes after which the disk is told to begin


class Writer(Protocol):
    """A file being written; closing it makes the bytes durable."""

    def write(self, data: memoryview, /) -> Any:
        """Add bytes."""
        ...


class Place(Protocol):
    """A folder that holds checkpoints, or files of one."""

    def join(self, name: str) -> "Place":
        """A folder inside this one."""
        ...

    def draft(self, name: str, token: str) -> "Place":
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
        """Size of every file, by name; -1 for what is not a plain file."""
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


def place_of(path: Any) -> Place:
    """The folder of a path or URL.

    Raises:
        CheckpointError: the path is not one.
        MissingPackageError: it is a URL, and fsspec is not installed.
    """
    if isinstance(path, str) and "://" in path and not path.startswith("file://"):
        fsspec = optional("fsspec", extra="remote", needed_by=f"The checkpoint folder {path!r}")
        if not path.partition("://")[2].strip("/"):
            raise CheckpointError(f"{path}: this address names no folder. Add a host or bucket.")
        try:
            system, inside = fsspec.core.url_to_fs(path)
        except (ImportError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: fsspec cannot open this address: {error}") from error
        return Remote(system, inside.rstrip("/"), path.rstrip("/"))
    if problem := path_problem(path):
        raise CheckpointError(f"The path of a checkpoint: {problem}.")
    return Local(os.path.abspath(os.fspath(path).removeprefix("file://")))


@attrs.frozen
class Local:
    """A folder on this machine, or on a file system that it shares with the other nodes."""

    path: str

    def __str__(self) -> str:
        return self.path

    def join(self, name: str) -> "Local":
        return Local(os.path.join(self.path, name))

    def draft(self, name: str, token: str) -> "Local":
        return self.join(f"{_TEMPORARY}{name}-{token}")

    def make(self) -> None:
        os.makedirs(self.path, exist_ok=True)

    def commit(self, name: str, token: str, manifest: bytes) -> None:
        draft, final = self.draft(name, token), self.join(name)
        with draft.create(MANIFEST) as file:
            file.write(memoryview(manifest))
        _sync(draft.path)
        if os.path.lexists(final.path):  # an empty folder would be replaced silently
            raise FileExistsError(errno.EEXIST, "there is one already", final.path)
        os.rename(draft.path, final.path)
        _sync(self.path)

    def folders(self) -> list[str]:
        return [name for name in self._names() if not name.startswith(_TEMPORARY)]

    def leftovers(self) -> list[str]:
        return [name for name in self._names() if name.startswith(_TEMPORARY)]

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.path) as found:
                return [one.name for one in found if one.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []

    def files(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with os.scandir(self.path) as found:
            for one in found:
                about = one.stat(follow_symlinks=False)
                sizes[one.name] = about.st_size if stat.S_ISREG(about.st_mode) else -1
        return sizes

    def remove(self, name: str) -> None:
        # Renamed first: a checkpoint that is half removed must not look like a whole one.
        inside = self.join(name).path
        if not name.startswith(_TEMPORARY):
            hidden = self.join(f"{_TEMPORARY}{name}-removed").path
            os.rename(inside, hidden)
            inside = hidden
        shutil.rmtree(inside)

    def read(self, name: str, most: int) -> bytes:
        descriptor = self._descriptor(name)
        with os.fdopen(descriptor, "rb") as file:
            if (size := os.fstat(descriptor).st_size) > most:
                raise CheckpointError(f"{name} of {size} bytes is larger than {most}.")
            return file.read()

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        descriptor = self._descriptor(name)

        def fill(offset: int, buffer: memoryview) -> None:
            done = 0
            while done < len(buffer):
                got = os.preadv(descriptor, [buffer[done:]], offset + done)
                if not got:
                    raise CheckpointError(f"{self.path}: {name} ends at {offset + done}.")
                done += got

        try:
            yield fill
        finally:
            os.close(descriptor)

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        with open(os.path.join(self.path, name), "xb", buffering=0) as file:
            yield _Early(_Whole(file), file.fileno())
            os.fsync(file.fileno())

    def _descriptor(self, name: str) -> int:
        # A link could lead out of the folder, and a pipe would wait for ever.
        descriptor = os.open(
            os.path.join(self.path, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        )
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{self.path}: {name} is not a plain file.")
        return descriptor


@attrs.frozen
class _Whole:
    """Writes all of it: the operating system may take a part and say so."""

    file: Any

    def write(self, data: memoryview) -> None:
        while data:
            data = data[self.file.write(data) :]


@attrs.define
class _Early:
    """Has the bytes go to the disk while more are written, so that the last wait is short."""

    inner: _Whole
    descriptor: int
    begin: int = 0
    end: int = 0

    def write(self, data: memoryview) -> None:
        self.inner.write(data)
        self.end += len(data)
        if self.end - self.begin >= _EARLY and hasattr(os, "posix_fadvise"):
            # Linux starts to write what is said not to be needed, and does not wait for it.
            size = self.end - self.begin
            os.posix_fadvise(self.descriptor, self.begin, size, os.POSIX_FADV_DONTNEED)
            self.begin = self.end


def _sync(path: str) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@attrs.frozen
class Remote:
    """A folder that fsspec reaches. The manifest, written last, is the mark of a commit."""

    system: Any
    path: str
    url: str

    def __str__(self) -> str:
        return self.url

    def join(self, name: str) -> "Remote":
        return Remote(self.system, f"{self.path}/{name}", f"{self.url}/{name}")

    def draft(self, name: str, token: str) -> "Remote":
        return self.join(name)

    def make(self) -> None:
        self.system.makedirs(self.path, exist_ok=True)

    def commit(self, name: str, token: str, manifest: bytes) -> None:
        self.system.pipe_file(f"{self.path}/{name}/{MANIFEST}", manifest)

    def folders(self) -> list[str]:
        return [name for name in self._names() if self._committed(name)]

    def leftovers(self) -> list[str]:
        return [name for name in self._names() if not self._committed(name)]

    def _names(self) -> list[str]:
        return [one for one, about in self._inside().items() if about["type"] == "directory"]

    def _committed(self, name: str) -> bool:
        return self.system.exists(f"{self.path}/{name}/{MANIFEST}")

    def _inside(self) -> dict[str, Any]:
        self.system.invalidate_cache(self.path)
        try:
            found = self.system.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}
        return {one["name"].rstrip("/").rpartition("/")[2]: one for one in found}

    def files(self) -> dict[str, int]:
        return {
            name: about["size"] if about["type"] == "file" else -1
            for name, about in self._inside().items()
        }

    def remove(self, name: str) -> None:
        if self._committed(name):  # without its manifest it is no checkpoint any more
            self.system.rm_file(f"{self.path}/{name}/{MANIFEST}")
        self.system.rm(f"{self.path}/{name}", recursive=True)

    def read(self, name: str, most: int) -> bytes:
        size = self.system.size(f"{self.path}/{name}")
        if size is None or size > most:
            raise CheckpointError(f"{name} of {size} bytes is larger than {most}.")
        return self.system.cat_file(f"{self.path}/{name}")

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        def fill(offset: int, buffer: memoryview) -> None:
            data = self.system.cat_file(
                f"{self.path}/{name}", start=offset, end=offset + len(buffer)
            )
            if len(data) != len(buffer):
                raise CheckpointError(f"{self.url}: {name} ends at {offset + len(data)}.")
            buffer[:] = data

        yield fill

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        with self.system.open(f"{self.path}/{name}", "wb") as file:
            yield _Whole(file)
