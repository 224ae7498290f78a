"""Checkpoint folders on file systems of fsspec: object stores, memory, other machines."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from fxtrain.checkpoint.manifest import MANIFEST
from fxtrain.checkpoint.storage import CompleteWriter, Writer, reading
from fxtrain.errors import CheckpointError, FxError

_LOCK, _END = ".lock-", ".json"


@attrs.frozen
class RemoteStorage:
    """A folder on an fsspec file system. Writing the manifest last commits a checkpoint."""

    system: Any
    path: str
    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def join(self, name: str) -> "RemoteStorage":
        return RemoteStorage(self.system, f"{self.path}/{name}", f"{self.url}/{name}")

    def begin(self, name: str, token: str) -> "RemoteStorage":
        return self.join(name)

    def make(self) -> None:
        self.system.makedirs(self.path, exist_ok=True)

    def key(self) -> str:
        return self.url

    def commit(self, name: str, token: str, manifest: bytes) -> None:
        # A conditional write, if the store supports it: a second commit of a name fails.
        self.system.pipe_file(f"{self.path}/{name}/{MANIFEST}", manifest, mode="create")

    def folders(self) -> list[str]:
        return [name for name in self._names() if self._committed(name)]

    def leftovers(self) -> list[str]:
        return [name for name in self._names() if not self._committed(name)]

    def _names(self) -> list[str]:
        return [one for one, about in self._inside().items() if about["type"] == "directory"]

    def _committed(self, name: str) -> bool:
        # Not `exists`, which reports every failure as absence.
        try:
            with _reached(f"{self.url}/{name}"):
                self.system.info(f"{self.path}/{name}/{MANIFEST}")
        except FileNotFoundError:
            return False
        return True

    def _inside(self) -> dict[str, Any]:
        try:
            with _reached(self.url):
                self.system.invalidate_cache(self.path)
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
        if self._committed(name):  # without a manifest it is no longer a checkpoint
            self.system.rm_file(f"{self.path}/{name}/{MANIFEST}")
        self.system.rm(f"{self.path}/{name}", recursive=True)

    def read(self, name: str, most: int) -> bytes:
        with _reached(f"{self.url}/{name}"):
            size = self.system.size(f"{self.path}/{name}")
            if size is None or size > most:
                raise CheckpointError(f"{self.path}/{name} has {size} bytes; the limit is {most}.")
            return self.system.cat_file(f"{self.path}/{name}")

    @contextmanager
    def open(self, name: str) -> Iterator[Any]:
        path = f"{self.path}/{name}"

        def fill(offset: int, buffer: memoryview) -> None:
            try:
                with _reached(f"{self.url}/{name}"):
                    data = self.system.cat_file(path, start=offset, end=offset + len(buffer))
            except OSError as error:
                raise CheckpointError(f"{self.url}: {name}: {error}.") from error
            if len(data) != len(buffer):
                raise CheckpointError(
                    f"{self.url}: {name} ends early, at {offset + len(data)}.", code="FX602"
                )
            buffer[:] = data

        yield fill

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        with self.system.open(f"{self.path}/{name}", "wb") as file:
            yield CompleteWriter(file)

    def locks(self) -> list[str]:
        return [
            name.removeprefix(_LOCK).removesuffix(_END)
            for name in self._inside()
            if name.startswith(_LOCK) and name.endswith(_END)
        ]

    def _lock(self, name: str) -> str:
        return f"{self.path}/{_LOCK}{name}{_END}"

    def lock(self, name: str, data: bytes) -> None:
        self.system.pipe_file(self._lock(name), data, mode="create")

    def locked(self, name: str) -> bytes | None:
        try:
            with _reached(f"{self.url}/{_LOCK}{name}{_END}"):
                return self.system.cat_file(self._lock(name))
        except FileNotFoundError:
            return None

    def refresh_lock(self, name: str, data: bytes) -> None:
        self.system.pipe_file(self._lock(name), data)

    def unlock(self, name: str) -> None:
        try:
            self.system.rm_file(self._lock(name))
        except FileNotFoundError:
            return


@contextmanager
def _reached(what: str) -> Iterator[None]:
    """Turn any error of a store's client into a read error."""
    with reading(what):
        try:
            yield
        except (OSError, FxError, MemoryError):
            raise
        except Exception as error:  # from boto, aiohttp or any other client
            raise OSError(f"{type(error).__name__}: {error}") from error
