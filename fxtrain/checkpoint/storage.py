"""Where checkpoints are stored: local folders, and file systems of fsspec.

A checkpoint is committed atomically. On a local file system it is written to a temporary folder
that is then renamed. Elsewhere, where a rename is not atomic, the manifest is written last, and
a folder without a manifest is not a checkpoint. Both kinds of storage have the same methods.
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import attrs

from fxtrain._optional import optional
from fxtrain._reading import path_problem
from fxtrain.errors import CheckpointError, FxError

MANIFEST = "manifest.json"  # a folder with this file is a checkpoint
_TEMPORARY = ".partial-"
_FLUSH_BYTES = 32 << 20  # bytes after which writing to disk starts
# Errors that mean "does not exist" or "is not a plain file" rather than "reading failed".
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG}

Write = Callable[[memoryview], object]
Fill = Callable[[int, memoryview], None]  # (offset, buffer): fills the buffer


class UnreadableError(CheckpointError):
    """Reading was refused or failed; the stored data may be intact."""

    code = "FX607"


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Raise `UnreadableError` if reading fails; an absent file stays an `OSError`."""
    try:
        yield
    except (FxError, MemoryError):
        raise
    except Exception as error:  # from the disk, or from boto, aiohttp or any other client
        if isinstance(error, OSError) and (
            error.errno in _ABSENT or isinstance(error, FileNotFoundError)
        ):
            raise
        raise UnreadableError(
            f"{what} cannot be read: {getattr(error, 'strerror', None) or error}. It may be "
            f"intact: try again once it is readable."
        ) from error


@attrs.frozen
class LocalStorage:
    """A folder on this machine, or on a file system that it shares with the other nodes.

    All methods that read raise `UnreadableError` if reading fails, and `FileNotFoundError` if
    there is nothing to read.
    """

    path: str

    def __str__(self) -> str:
        return self.path

    def join(self, name: str) -> "LocalStorage":
        """A folder inside this one."""
        return LocalStorage(os.path.join(self.path, name))

    def begin(self, name: str, token: str) -> "LocalStorage":
        """The draft that `commit` turns into the folder `name`; equal on every rank."""
        return self.join(f"{_TEMPORARY}{name}-{token}")

    def make(self) -> None:
        """Create the folder and its parents."""
        os.makedirs(self.path, exist_ok=True)

    def commit(self, name: str, token: str, manifest: bytes) -> None:
        """Write the manifest and make the draft appear as the folder `name`."""
        draft, final = self.begin(name, token), self.join(name)
        with draft.create(MANIFEST) as write:
            write(memoryview(manifest))
        sync_folder(Path(draft.path))
        if os.path.lexists(final.path):  # `rename` silently replaces an empty folder
            raise FileExistsError(errno.EEXIST, "already exists", final.path)
        os.rename(draft.path, final.path)
        sync_folder(Path(self.path))

    def folders(self) -> list[str]:
        """Names of the folders inside that are not temporary; none if it does not exist."""
        return [name for name in self._names() if not name.startswith(_TEMPORARY)]

    def leftovers(self) -> list[str]:
        """Names of drafts that were never committed."""
        return [name for name in self._names() if name.startswith(_TEMPORARY)]

    def _names(self) -> list[str]:
        try:
            with reading(self.path), os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            return []
        except NotADirectoryError as error:
            raise CheckpointError(f"{self.path} is a file. Pass a folder.") from error
        except OSError as error:
            raise CheckpointError(f"{self.path}: {error.strerror}. Pass a folder.") from error

    def files(self) -> dict[str, int]:
        """Size of every file, by name; -1 if it is not a plain file."""
        sizes: dict[str, int] = {}
        with reading(self.path), os.scandir(self.path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # a draft that a save has renamed meanwhile
                    about = entry.stat(follow_symlinks=False)
                    sizes[entry.name] = about.st_size if stat.S_ISREG(about.st_mode) else -1
        return sizes

    def remove(self, name: str) -> None:
        """Remove a folder inside this one."""
        # Renamed first: a partially removed checkpoint must not look like a complete one.
        inside = self.join(name).path
        if not name.startswith(_TEMPORARY):
            hidden = self.join(f"{_TEMPORARY}{name}-removed").path
            os.rename(inside, hidden)
            inside = hidden
        shutil.rmtree(inside)

    def read(self, name: str, most: int) -> bytes:
        """The bytes of a file; an error if there are more than `most`."""
        with reading(f"{self.path}/{name}"), os.fdopen(self._descriptor(name), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > most:
                raise CheckpointError(f"{self.path}/{name} has {size} bytes; the limit is {most}.")
            return file.read()

    @contextmanager
    def open(self, name: str) -> Iterator[Fill]:
        """Open a file for reading parts of it."""
        try:
            with reading(f"{self.path}/{name}"):
                descriptor = self._descriptor(name)
        except OSError as error:  # it does not exist or is not a file
            raise CheckpointError(f"{self.path}: {name}: {error.strerror}.") from error

        def fill(offset: int, buffer: memoryview) -> None:
            done = 0
            while done < len(buffer):
                with reading(f"{self.path}/{name}"):
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
    def create(self, name: str) -> Iterator[Write]:
        """Write a new file; its bytes are durable afterwards."""
        with open(os.path.join(self.path, name), "xb") as file:
            begin = end = 0

            def write(data: memoryview) -> None:
                nonlocal begin, end
                file.write(data)
                end += len(data)
                # On Linux, DONTNEED starts writing back dirty pages without waiting, so that the
                # final `fsync` is short.
                if end - begin >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), begin, end - begin, os.POSIX_FADV_DONTNEED)
                    begin = end

            yield write
            file.flush()
            os.fsync(file.fileno())

    def key(self) -> str:
        """A key that is equal for all paths to the same folder."""
        return os.path.realpath(self.path)

    def put(self, name: str, data: bytes, *, new: bool) -> None:
        """Create a small file, or replace the bytes of one by as many others.

        Raises:
            FileExistsError: it is to be new, and exists.
        """
        path = os.path.join(self.path, name)
        with open(path, "xb" if new else "r+b", buffering=0) as file:
            try:
                file.write(data)
            except OSError:
                if new:
                    os.unlink(path)
                raise

    def unlink(self, name: str) -> None:
        """Remove a file; does nothing if it does not exist."""
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(self.path, name))

    def exclusive(self) -> AbstractContextManager[None]:
        """Run a block in one process of this machine at a time, if the file system can."""
        return locked(Path(self.path))

    def _descriptor(self, name: str) -> int:
        # A symlink could point outside the folder, and opening a pipe would block.
        return os.open(os.path.join(self.path, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


@attrs.frozen
class RemoteStorage:
    """A folder on an fsspec file system. Writing the manifest last commits a checkpoint."""

    system: Any
    path: str
    url: str

    def __str__(self) -> str:
        return self.url

    def join(self, name: str) -> "RemoteStorage":
        return RemoteStorage(self.system, f"{self.path}/{name}", f"{self.url}/{name}")

    def begin(self, name: str, token: str) -> "RemoteStorage":
        return self.join(name)

    def make(self) -> None:
        self.system.makedirs(self.path, exist_ok=True)

    def commit(self, name: str, token: str, manifest: bytes) -> None:
        # A second commit of a name fails.
        self.join(name).put(MANIFEST, manifest, new=True)

    def folders(self) -> list[str]:
        return [name for name in self._names() if self._committed(name)]

    def leftovers(self) -> list[str]:
        return [name for name in self._names() if not self._committed(name)]

    def _names(self) -> list[str]:
        return [name for name, about in self._inside().items() if about["type"] == "directory"]

    def _committed(self, name: str) -> bool:
        # Not `exists`, which reports every failure as absence.
        try:
            with reading(f"{self.url}/{name}"):
                self.system.info(f"{self.path}/{name}/{MANIFEST}")
        except FileNotFoundError:
            return False
        return True

    def _inside(self) -> dict[str, Any]:
        try:
            with reading(self.url):
                self.system.invalidate_cache(self.path)
                entries = self.system.ls(self.path, detail=True)
        except FileNotFoundError:
            return {}
        return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in entries}

    def files(self) -> dict[str, int]:
        return {
            name: about["size"] if about["type"] == "file" else -1
            for name, about in self._inside().items()
        }

    def remove(self, name: str) -> None:
        if self._committed(name):  # without a manifest it is no longer a checkpoint
            self.system.rm_file(f"{self.path}/{name}/{MANIFEST}")
        self.system.rm(f"{self.path}/{name}", recursive=True)

    def read(self, name: str, most: int) -> bytes:
        with reading(f"{self.url}/{name}"):
            size = self.system.size(f"{self.path}/{name}")
            if size is None or size > most:
                raise CheckpointError(f"{self.path}/{name} has {size} bytes; the limit is {most}.")
            return self.system.cat_file(f"{self.path}/{name}")

    @contextmanager
    def open(self, name: str) -> Iterator[Fill]:
        path = f"{self.path}/{name}"

        def fill(offset: int, buffer: memoryview) -> None:
            with reading(f"{self.url}/{name}"):
                data = self.system.cat_file(path, start=offset, end=offset + len(buffer))
            if len(data) != len(buffer):
                raise CheckpointError(
                    f"{self.url}: {name} ends early, at {offset + len(data)}.", code="FX602"
                )
            buffer[:] = data

        yield fill

    @contextmanager
    def create(self, name: str) -> Iterator[Write]:
        with self.system.open(f"{self.path}/{name}", "wb") as file:
            yield file.write

    def key(self) -> str:
        return self.url

    def put(self, name: str, data: bytes, *, new: bool) -> None:
        # A conditional write, if the store supports it.
        mode = "create" if new else "overwrite"
        self.system.pipe_file(f"{self.path}/{name}", data, mode=mode)

    def unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.system.rm_file(f"{self.path}/{name}")

    def exclusive(self) -> nullcontext[None]:
        return nullcontext()


Storage = LocalStorage | RemoteStorage


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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Run a block in one process of this machine at a time, if the file system has locks."""
    if os.name != "posix":
        yield
        return
    import fcntl  # not on every system

    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, if the system supports it."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
