"""Read tensors from a checkpoint: only the bytes that are needed, each of them verified."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import add, ge, sub

import attrs
import torch
from torch import Tensor

from fxtrain.checkpoint.manifest import (
    CHUNK,
    DataFile,
    Manifest,
    StoredBox,
    StoredTensor,
    digest_of,
    kinds_of,
)
from fxtrain.checkpoint.storage import Fill, Storage
from fxtrain.checkpoint.write_plan import held_boxes
from fxtrain.errors import CheckpointError
from fxtrain.ops.tensor_bytes import DTYPES, memory_of
from fxtrain.state import FlatShard

_BLOCK = 64 << 20  # bytes read at once when only some columns are needed
_MAX_OPEN = 512  # data files; systems let a process open 1,024 files by default


@attrs.frozen(kw_only=True, eq=False)
class Reader:
    """The tensors of one checkpoint.

    Attributes:
        storage: Its folder.
        manifest: Its manifest.
        files: Functions that read the open data files, each with its context.
        loaded: Full tensors that `once` has read.
    """

    storage: Storage
    manifest: Manifest
    files: dict[str, tuple[Fill, AbstractContextManager[Fill]]] = attrs.field(factory=dict)
    loaded: dict[str, Tensor] = attrs.field(factory=dict)

    def entry(self, name: str) -> StoredTensor:
        """The manifest entry of a tensor."""
        return self.manifest.tensors[self.manifest.aliases.get(name, name)]

    def dtype(self, name: str) -> str:
        """The dtype of a tensor, as the manifest names it."""
        return kinds_of(self.manifest.tensors)[self.manifest.aliases.get(name, name)][0]

    def fill(
        self, name: str, tensor: Tensor | FlatShard, entry: StoredTensor | None = None
    ) -> None:
        """Read values into a tensor of the saved shape and dtype, plain or sharded.

        Args:
            entry: That of a per-rank tensor.

        Raises:
            CheckpointError: shapes or dtypes differ, or the bytes are not as written.
        """
        entry = entry or self.entry(name)
        dtype = tensor.values.dtype if isinstance(tensor, FlatShard) else tensor.dtype
        if tuple(tensor.shape) != entry.shape or dtype != DTYPES[entry.dtype]:
            raise CheckpointError(
                f"{name} has dtype {entry.dtype} and shape {list(entry.shape)} in the checkpoint, "
                f"but {str(dtype).removeprefix('torch.')} and {list(tensor.shape)} in this "
                f"process. Restore into the model that was saved.",
                code="FX603",
            )
        with torch.no_grad():
            for start, values in held_boxes(tensor):
                self._fill_box(entry, name, start, values)
        if not isinstance(tensor, FlatShard):
            # The bytes were written without torch noticing.
            torch.autograd.graph.increment_version(tensor)

    def new(self, name: str, entry: StoredTensor | None = None) -> Tensor:
        """Read a full tensor; a per-rank tensor by its entry."""
        entry = entry or self.entry(name)
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="cpu")
        self._fill_box(entry, name, (0,) * tensor.ndim, tensor)
        return tensor

    def box(self, name: str, box: tuple[slice, ...]) -> Tensor:
        """Read a box of a tensor: a range per dimension."""
        entry = self.entry(name)
        sizes = [along.stop - along.start for along in box]
        values = torch.empty(sizes, dtype=DTYPES[entry.dtype], device="cpu")
        self._fill_box(entry, name, tuple(along.start for along in box), values)
        return values

    def once(self, name: str) -> Tensor:
        """Read a full tensor once; aliases share it, as they did when it was saved."""
        stored = self.manifest.aliases.get(name, name)
        if stored not in self.loaded:
            self.loaded[stored] = self.new(name)
        return self.loaded[stored]

    def _fill_box(
        self, entry: StoredTensor, name: str, start: tuple[int, ...], out: Tensor
    ) -> None:
        """Fill a tensor with the box of its shape that begins at `start`."""
        direct = out.device.type == "cpu" and out.is_contiguous()
        target = out if direct else torch.empty(out.shape, dtype=out.dtype, device="cpu")
        for part, low, high in overlapping(entry, start, target.shape):
            inner = list(map(slice, map(sub, low, part.start), map(sub, high, part.start)))
            outer = tuple(map(slice, map(sub, low, start), map(sub, high, start)))
            self._copy(name, part, inner, target[outer])
        if not direct:
            # Elements of an expanded tensor share memory, which torch refuses to write twice.
            single = tuple(slice(0, 1) if not stride else slice(None) for stride in out.stride())
            if not _same_bits(target[single].expand_as(target), target):
                raise CheckpointError(
                    f"{name} is expanded in this process, with elements that share memory, but "
                    f"was saved with different values in them. Restore into the model that was "
                    f"saved, or clone() the tensor.",
                    code="FX603",
                )
            out[single].copy_(target[single])

    def _copy(self, name: str, part: StoredBox, inner: list[slice], goal: Tensor) -> None:
        """Copy a range of a part into a tensor, in blocks of the part's rows."""
        row = math.prod(part.shape[1:]) * goal.element_size()
        first, rows = (inner[0].start, len(goal)) if inner else (0, 1)
        if goal.is_contiguous() and goal.nbytes == rows * row:
            self._fetch(name, part, goal, first * row)
            return
        step = max(1, _BLOCK // row)
        for at in range(0, rows, step):
            count = min(step, rows - at)
            block = torch.empty((count, *part.shape[1:]), dtype=goal.dtype, device="cpu")
            self._fetch(name, part, block, (first + at) * row)
            goal[at : at + count].copy_(block[(slice(None), *inner[1:])])

    def _open(self, name: str) -> None:
        if len(self.files) == _MAX_OPEN:  # a checkpoint of so many ranks; the oldest goes
            self.files.pop(next(iter(self.files)))[1].__exit__(None, None, None)
        opened = self.storage.open(name)
        self.files[name] = opened.__enter__(), opened
        check_header(self.files[name][0], name, self.manifest.files[name])

    def _fetch(self, name: str, part: StoredBox, goal: Tensor, begin: int) -> None:
        """Fill a tensor with bytes of a part from `begin` on, and verify each chunk they touch."""
        if part.file not in self.files:
            self._open(part.file)
        read, into = self.files[part.file][0], memory_of(goal)
        size = math.prod(part.shape) * goal.element_size()
        end = begin + len(into)
        for low in range(begin - begin % CHUNK, end, CHUNK):
            high = min(low + CHUNK, size)
            fits = begin <= low and high <= end
            chunk = into[low - begin : high - begin] if fits else memoryview(bytearray(high - low))
            read(part.offset + low, chunk)
            if digest_of(chunk) != part.digests[low // CHUNK]:
                raise CheckpointError(
                    f"{self.storage}: {name} was changed after it was written: the digest of bytes "
                    f"{part.offset + low} to {part.offset + high} of {part.file} does not match. "
                    f"Restore an earlier checkpoint.",
                    code="FX602",
                )
            if not fits:
                a, b = max(low, begin), min(high, end)
                into[a - begin : b - begin] = chunk[a - low : b - low]


def overlapping(
    entry: StoredTensor, start: tuple[int, ...], shape: Sequence[int]
) -> Iterator[tuple[StoredBox, list[int], list[int]]]:
    """The parts of a tensor that overlap a box of it, each with the first and last of both."""
    ends = list(map(add, start, shape))
    for part in entry.parts:
        # Of a thousand parts, most lie elsewhere along the first dimension.
        if ends and not (part.start[0] < ends[0] and start[0] < part.start[0] + part.shape[0]):
            continue
        low = list(map(max, start, part.start))
        high = list(map(min, ends, map(add, part.start, part.shape)))
        if not any(map(ge, low, high)):
            yield part, low, high


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return left.stride() == right.stride() or memory_of(left.contiguous()) == memory_of(right)


@contextmanager
def open_reader(storage: Storage, manifest: Manifest) -> Iterator[Reader]:
    """Open a checkpoint for reading, and close its files afterwards.

    Raises:
        CheckpointError: a data file is missing, has the wrong size, or is not a plain file.
    """
    problems = file_problems(storage.files(), manifest)
    if problems:
        raise CheckpointError("\n".join([f"{storage} is damaged:", *problems]), code="FX602")
    reader = Reader(storage=storage, manifest=manifest)
    try:
        yield reader
    finally:
        for _, opened in reader.files.values():
            opened.__exit__(None, None, None)


def check_header(read: Fill, name: str, file: DataFile) -> None:
    """Raise if the header of a data file is not as it was written."""
    header = bytearray(file.header)
    read(0, memoryview(header))
    if digest_of(header) != file.digest:
        raise CheckpointError(f"The header of {name} was changed.", code="FX602")


def file_problems(sizes: Mapping[str, int], manifest: Manifest) -> list[str]:
    """Problems with the names and sizes of a checkpoint's files."""
    problems: list[str] = []
    for name, file in manifest.files.items():
        size = sizes.get(name)
        if size is None:
            problems.append(f"  {name} is missing")
        elif size < 0:
            problems.append(f"  {name} is not a plain file")
        elif size != file.size:
            problems.append(f"  {name} has {size} bytes, but was written with {file.size}")
    return problems
