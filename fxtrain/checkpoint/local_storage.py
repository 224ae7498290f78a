"""Where checkpoints are stored: local folders, and file systems of fsspec.

A checkpoint is committed atomically. On a local file system it is written to a temporary folder
that is then renamed. Elsewhere, where a rename is not atomic, the manifest is written last, and
a folder without a manifest is not a checkpoint.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from fxtrain._optional import optional
from fxtrain._reading import path_problem
from fxtrain.checkpoint.manifest import MANIFEST
from fxtrain.checkpoint.remote_storage import RemoteStorage
from fxtrain.checkpoint.storage import CompleteWriter as _Whole
from fxtrain.checkpoint.storage import Storage, Writer, reading
from fxtrain.errors import CheckpointError

_TEMPORARY = ".partial-"
_LOCK, _OWNER = ".lock-", "owner.json"
_LOCK_BYTES = 1 << 16
_FLUSH_BYTES = 32 << 20  # bytes after which writing to disk starts


def open_storage(path: Any) -> Storage:
    """Open the folder at a path or URL.

    Raises:
        CheckpointError: the path is not valid.
        MissingPackageError: it is a URL, and fsspec is not installed.
    """
    if isinstance(path, str) and "\0" in path:
        raise CheckpointError(f"{path!r} is not a path: it contains a NUL character.")
    if isinstance(path, str) and "://" in path and not path.startswith("file://"):
        fsspec = optional("fsspec", extra="remote", needed_by=f"The checkpoint folder {path!r}")
        if not path.partition("://")[2].strip("/"):
            raise CheckpointError(f"{path}: this address names no folder. Add a host or bucket.")
        try:
            system, inside = fsspec.core.url_to_fs(path)
        except (ImportError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: fsspec cannot open this address: {error}") from error
        return RemoteStorage(system, inside.rstrip("/"), path.rstrip("/"))
    if problem := path_problem(path):
        raise CheckpointError(f"The path of a checkpoint: {problem}.")
    return LocalStorage(os.path.abspath(os.fspath(path).removeprefix("file://")))


@attrs.frozen
class LocalStorage:
    """A folder on this machine, or on a file system that it shares with the other nodes."""

    path: str

    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    def join(self, name: str) -> "LocalStorage":
        return LocalStorage(os.path.join(self.path, name))

    def begin(self, name: str, token: str) -> "LocalStorage":
        return self.join(f"{_TEMPORARY}{name}-{token}")

    def make(self) -> None:
        os.makedirs(self.path, exist_ok=True)

    def commit(self, name: str, token: str, manifest: bytes) -> None:
        draft, final = self.begin(name, token), self.join(name)
        with draft.create(MANIFEST) as file:
            file.write(memoryview(manifest))
        _sync(draft.path)
        if os.path.lexists(final.path):  # `rename` silently replaces an empty folder
            raise FileExistsError(errno.EEXIST, "already exists", final.path)
        os.rename(draft.path, final.path)
        _sync(self.path)

    def folders(self) -> list[str]:
        return [name for name in self._names() if not name.startswith(_TEMPORARY)]

    def leftovers(self) -> list[str]:
        return [name for name in self._names() if name.startswith(_TEMPORARY)]

    def _names(self) -> list[str]:
        try:
            with reading(self.path), os.scandir(self.path) as found:
                return [one.name for one in found if one.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise CheckpointError(f"{self.path} is a file. Pass a folder.") from error

    def files(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        with reading(self.path), os.scandir(self.path) as found:
            for one in found:
                about = one.stat(follow_symlinks=False)
                sizes[one.name] = about.st_size if stat.S_ISREG(about.st_mode) else -1
        return sizes

    def remove(self, name: str) -> None:
        # Renamed first: a partially removed checkpoint must not look like a complete one.
        inside = self.join(name).path
        if not name.startswith(_TEMPORARY):
            hidden = self.join(f"{_TEMPORARY}{name}-removed").path
            os.rename(inside, hidden)
            inside = hidden
        shutil.rmtree(inside)

    def read(self, name: str, most: int) -> bytes:
        descriptor = self._descriptor(name)
        with reading(os.path.join(self.path, name)), os.fdopen(descriptor, "rb") as file:
            if (size := os.fstat(descriptor).st_size) > most:
                raise CheckpointError(f"{self.path}/{name} has {size} bytes; the limit is {most}.")
            return file.read()

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        try:
            descriptor = self._descriptor(name)
        except OSError as error:  # it does not exist or is not a file
            raise CheckpointError(f"{self.path}: {name}: {error.strerror}.") from error

        def fill(offset: int, buffer: memoryview) -> None:
            done = 0
            while done < len(buffer):
                with reading(os.path.join(self.path, name)):
                    got = os.preadv(descriptor, [buffer[done:]], offset + done)
                if not got:
                    raise CheckpointError(
                        f"{self.path}: {name} ends early, at {offset + done}.", code="FX602"
                    )
                done += got

        try:
            yield fill
        finally:
            os.close(descriptor)

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        with open(os.path.join(self.path, name), "xb", buffering=0) as file:
            yield _EagerFlush(_Whole(file), file.fileno())
            os.fsync(file.fileno())

    def key(self) -> str:
        return os.path.realpath(self.path)

    def locks(self) -> list[str]:
        return [name.removeprefix(_LOCK) for name in self._names() if name.startswith(_LOCK)]

    def lock(self, name: str, data: bytes) -> None:
        # A folder, because renaming to a non-empty folder fails.
        draft = self.join(f"{_TEMPORARY}lock-{secrets.token_hex(4)}").path
        os.mkdir(draft)
        try:
            with open(os.path.join(draft, _OWNER), "xb") as file:
                file.write(data)
            os.rename(draft, self.join(_LOCK + name).path)
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                # The lock exists, or its owner just removed our draft as an abandoned one.
                raise FileExistsError(errno.EEXIST, "already exists", name) from error
            raise

    def locked(self, name: str) -> bytes | None:
        try:
            return self.join(_LOCK + name).read(_OWNER, _LOCK_BYTES)
        except FileNotFoundError:
            return None

    def refresh_lock(self, name: str, data: bytes) -> None:
        with open(os.path.join(self.path, _LOCK + name, _OWNER), "r+b") as file:
            file.write(data)

    def unlock(self, name: str) -> None:
        hidden = self.join(f"{_TEMPORARY}lock-{secrets.token_hex(4)}").path
        try:
            os.rename(self.join(_LOCK + name).path, hidden)
        except FileNotFoundError:
            return
        shutil.rmtree(hidden, ignore_errors=True)  # no longer a lock; the next save removes it

    def _descriptor(self, name: str) -> int:
        # A symlink could point outside the folder, and opening a pipe would block.
        path = os.path.join(self.path, name)
        with reading(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CheckpointError(f"{self.path}: {name} is not a plain file.")
        return descriptor


@attrs.define
class _EagerFlush:
    """Starts flushing to disk during the write, so that the final `fsync` is short."""

    inner: _Whole
    descriptor: int
    begin: int = 0
    end: int = 0

    def write(self, data: memoryview) -> None:
        self.inner.write(data)
        self.end += len(data)
        if self.end - self.begin >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            # On Linux, DONTNEED starts writing back dirty pages without waiting.
            size = self.end - self.begin
            os.posix_fadvise(self.descriptor, self.begin, size, os.POSIX_FADV_DONTNEED)
            self.begin = self.end


def _sync(path: str) -> None:
    """Make the entries of a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
