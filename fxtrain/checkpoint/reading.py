"""Reading tensors out of a checkpoint: only the bytes that are needed, each checked first."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint.local_storage import Storage
from fxtrain.checkpoint.manifest import CHUNK, Entry, File, Manifest, Part, digest_of
from fxtrain.checkpoint.write_plan import box_of, boxes_in
from fxtrain.models.tensor_bytes import DTYPES, memory_of
from fxtrain.state import FlatShard

__all__ = ["Reader", "file_problems", "files_of", "header_of", "open_reader"]

_BLOCK = 64 << 20  # bytes that are held while picking a part of their columns


@attrs.frozen(kw_only=True, eq=False)
class Reader:
    """The tensors of one checkpoint.

    Attributes:
        storage: Its folder.
        manifest: What it holds.
        files: Functions that read the data files, opened on first use.
        stack: Closes them.
        made: Whole tensors that were read once for all.
    """

    storage: Storage
    manifest: Manifest
    files: dict[str, Any] = attrs.field(factory=dict)
    stack: ExitStack = attrs.field(factory=ExitStack)
    made: dict[str, Tensor] = attrs.field(factory=dict)

    def entry(self, name: str) -> Entry:
        """What the manifest says of a tensor."""
        found = self.manifest.aliases.get(name, name)
        return self.manifest.tensors[found]

    def fill(self, name: str, tensor: Tensor | FlatShard) -> None:
        """Read a tensor's values into a tensor of its shape and dtype, plain or spread.

        Raises:
            CheckpointError: shapes or dtypes differ, or the bytes are not those that were
                written.
        """
        self.fill_entry(self.entry(name), name, tensor)

    def fill_entry(self, entry: Entry, name: str, tensor: Tensor | FlatShard) -> None:
        """The same for an entry that is not in the common table."""
        dtype = tensor.values.dtype if isinstance(tensor, FlatShard) else tensor.dtype
        if tuple(tensor.shape) != entry.shape or dtype != DTYPES[entry.dtype]:
            raise CheckpointError(
                f"{name} is {entry.dtype} of shape {list(entry.shape)} in the checkpoint and "
                f"{str(dtype).removeprefix('torch.')} of {list(tensor.shape)} here."
            )
        if isinstance(tensor, FlatShard):
            for start, box in boxes_in(tensor):
                self._fill_box(entry, name, start, box)
            return
        if isinstance(tensor, DTensor):
            start, _ = box_of(tensor)
            local = tensor.to_local()
        else:
            start, local = (0,) * tensor.ndim, tensor
        with torch.no_grad():
            self._fill_box(entry, name, start, local.detach())
        # The bytes were put there behind torch's back.
        torch.autograd.graph.increment_version(tensor)

    def new(self, name: str) -> Tensor:
        """A whole tensor of the checkpoint."""
        return self.new_entry(self.entry(name), name)

    def once(self, name: str) -> Tensor:
        """The same, one for all who ask for it and for all of its names, as when it was saved."""
        found = self.manifest.aliases.get(name, name)
        if found not in self.made:
            self.made[found] = self.new(name)
        return self.made[found]

    def new_entry(self, entry: Entry, name: str) -> Tensor:
        """The same for an entry that is not in the common table."""
        made = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.fill_entry(entry, name, made)
        return made

    def _fill_box(self, entry: Entry, name: str, start: tuple[int, ...], out: Tensor) -> None:
        direct = out.device.type == "cpu" and out.is_contiguous()
        target = out if direct else torch.empty(out.shape, dtype=out.dtype)
        for part in entry.parts:
            overlap = _overlap(start, tuple(out.shape), part.start, part.shape)
            if overlap is not None:
                self._copy(entry, name, part, start, overlap, target)
        if not direct:
            out.copy_(target)

    def _copy(
        self,
        entry: Entry,
        name: str,
        part: Part,
        start: tuple[int, ...],
        overlap: list[tuple[int, int]],
        target: Tensor,
    ) -> None:
        """Copy what a part and the wanted box share, in blocks of the part's rows."""
        row = math.prod(part.shape[1:]) * entry.itemsize
        inner = tuple(
            slice(a - b, a - b + n) for (a, n), b in zip(overlap[1:], part.start[1:], strict=True)
        )
        there = tuple(slice(a - b, a - b + n) for (a, n), b in zip(overlap, start, strict=True))
        goal = target[there] if overlap else target
        first, rows = (overlap[0][0] - part.start[0], overlap[0][1]) if overlap else (0, 1)
        if goal.is_contiguous() and goal.numel() * entry.itemsize == rows * row:
            self._fetch(name, part, entry, first * row, memory_of(goal))
            return
        step = max(1, _BLOCK // row)
        for at in range(0, rows, step):
            count = min(step, rows - at)
            block = torch.empty((count, *part.shape[1:]), dtype=target.dtype)
            self._fetch(name, part, entry, (first + at) * row, memory_of(block))
            goal[at : at + count].copy_(block[(slice(None), *inner)])

    def _fetch(self, name: str, part: Part, entry: Entry, begin: int, into: memoryview) -> None:
        """Fill a buffer with bytes of a part from `begin` on, checking every chunk they touch."""
        read = self._file(part.file)
        size = math.prod(part.shape) * entry.itemsize
        end = begin + len(into)
        for low in range(begin - begin % CHUNK, end, CHUNK):
            high = min(low + CHUNK, size)
            whole = begin <= low and high <= end
            chunk = into[low - begin : high - begin] if whole else memoryview(bytearray(high - low))
            read(part.offset + low, chunk)
            if digest_of(chunk) != part.digests[low // CHUNK]:
                raise CheckpointError(
                    f"{self.storage}: {name} was changed after it was written: bytes "
                    f"{part.offset + low} to {part.offset + high} of {part.file} have another "
                    f"digest. Restore an earlier checkpoint."
                )
            if not whole:
                a, b = max(low, begin), min(high, end)
                into[a - begin : b - begin] = chunk[a - low : b - low]

    def _file(self, name: str) -> Any:
        if name not in self.files:
            read = self.stack.enter_context(self.storage.open(name))
            header_of(read, name, self.manifest.files[name])
            self.files[name] = read
        return self.files[name]


@contextmanager
def open_reader(storage: Storage, manifest: Manifest) -> Iterator[Reader]:
    """Read from a checkpoint, and close its files afterwards.

    Raises:
        CheckpointError: a data file is missing, of another size, or no plain file.
    """
    problems = file_problems(files_of(storage), manifest)
    if problems:
        raise CheckpointError("\n".join([f"{storage} is damaged:", *problems]))
    reader = Reader(storage=storage, manifest=manifest)
    with reader.stack:
        yield reader


def header_of(read: Any, name: str, file: File) -> bytes:
    """The header of a data file.

    Raises:
        CheckpointError: it is not what was written.
    """
    header = bytearray(file.header)
    read(0, memoryview(header))
    if digest_of(header) != file.digest:
        raise CheckpointError(f"The header of {name} was changed.")
    return bytes(header)


def files_of(storage: Storage) -> dict[str, int]:
    """Size of every file of a checkpoint, by name.

    Raises:
        CheckpointError: it is not there, or cannot be read.
    """
    try:
        return storage.files()
    except OSError as error:
        raise CheckpointError(f"{storage}: {error.strerror or error}.") from error


def file_problems(found: Mapping[str, int], manifest: Manifest) -> list[str]:
    """What is wrong with the files of a checkpoint, by their names and sizes."""
    problems: list[str] = []
    for name, file in manifest.files.items():
        size = found.get(name)
        if size is None:
            problems.append(f"  {name} is missing")
        elif size < 0:
            problems.append(f"  {name} is not a plain file")
        elif size != file.size:
            problems.append(f"  {name} has {size} bytes, and was written with {file.size}")
    return problems


def _overlap(
    start: tuple[int, ...], shape: tuple[int, ...], other: tuple[int, ...], size: tuple[int, ...]
) -> list[tuple[int, int]] | None:
    """(begin, length) per dimension of what two boxes share; None for nothing."""
    found: list[tuple[int, int]] = []
    for a, n, b, m in zip(start, shape, other, size, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if low >= high:
            return None
        found.append((low, high - low))
    return found
