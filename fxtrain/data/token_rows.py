"""Rows of a fixed length, cut from files of tokens that stay on disk."""

import bisect
import functools
import mmap
import os
import struct

import attrs
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fxtrain._errors import DataError
from fxtrain.data.sharded_loader import Sharded
from fxtrain.data.sharding import shard
from fxtrain.state import DistContext, MegatronTokens, NanoGPTTokens, Plan

# The codes of integer types in `.idx` files.
_CODES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    8: torch.uint16,
}
_HEAD = struct.Struct("<9sQBQQ")  # magic, version, dtype, sequences, document bounds
_NO_LABEL = -100  # `ignore_index` of torch's cross-entropy
_OPEN_MAPS = 32  # of one process


def tokens(
    source: MegatronTokens | NanoGPTTokens,
    ctx: DistContext,
    plan: Plan | None = None,
    *,
    length: int,
    batch_size: int,
    shuffle: bool = True,
) -> Sharded[dict[str, Tensor]]:
    """Split rows of tokens over the ranks.

    The documents of the source are concatenated and cut into rows of `length` tokens. Rows are
    computed from their number: there is no cache and no build, and a start or a resume at any row
    reads the header alone. Order, ranks and cursor are those of `fx.shard`.

    Args:
        source: Where the tokens are; mapped into memory, not read whole.
        ctx: The ranks, as in `fx.shard`.
        plan: As in `fx.shard`.
        length: Tokens of a row.
        batch_size: Rows of a batch, per rank or of all ranks, as the plan says.
        shuffle: Permute the rows, by the seed of the plan and the epoch.

    Returns:
        A loader like that of `fx.shard`. `batch.data` has int64 tensors of shape
        `(rows, length)`: `tokens`; `labels`, the next token of the same document, or -100 at its
        end; `positions`, which restart with every document and row; `documents`, the number of
        the document in its row, from 0. After the last token of the source, the last row is
        padded: `tokens` and `positions` are 0, `labels` -100 and `documents` -1.

    Effects:
        Maps the files, and those of `fx.shard`.

    Raises:
        DataError: a file is missing or empty, or its header and its size disagree; or those of
            `fx.shard`.

    Example:
        >>> import array, fxtrain as fx, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder, fx.detect(env={}, device="cpu") as ctx:
        ...     path = pathlib.Path(folder, "train.bin")
        ...     _ = path.write_bytes(array.array("H", [5, 6, 0, 7, 8, 9, 0]).tobytes())
        ...     source = fx.NanoGPTTokens(path=str(path), end=0)
        ...     for batch in fx.tokens(source, ctx, length=4, batch_size=1, shuffle=False):
        ...         batch.data["tokens"].tolist(), batch.data["labels"].tolist()
        ([[5, 6, 0, 7]], [[6, 0, -100, 8]])
        ([[8, 9, 0, 0]], [[9, 0, -100, -100]])
    """
    if not isinstance(source, MegatronTokens | NanoGPTTokens):
        raise DataError(
            f"tokens: source is a {type(source).__name__}. Pass fx.MegatronTokens(path=...) or "
            f"fx.NanoGPTTokens(path=...)."
        )
    for name, value in (("length", length), ("batch_size", batch_size)):
        if type(value) is not int or value < 1:
            raise DataError(f"tokens({name}={value!r}): pass a number, 1 or more.")
    rows = _Rows(source=source, length=length, changed_ns=_changed_ns(source))
    return shard(DataLoader(rows, batch_size=batch_size, shuffle=shuffle), ctx, plan)


@attrs.frozen(kw_only=True, eq=False)
class _Rows(Dataset[dict[str, Tensor]]):
    """Rows of a source; pickled without its maps, which each process opens."""

    source: MegatronTokens | NanoGPTTokens
    length: int
    changed_ns: int  # so that a file that has changed is mapped again

    def __len__(self) -> int:
        return -(-len(_opened(self.source, self.changed_ns).tokens) // self.length)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        opened = _opened(self.source, self.changed_ns)
        start = row * self.length
        found = opened.tokens[start : start + self.length + 1].long()
        size = min(len(found), self.length)
        # 1 where a document starts.
        first = torch.zeros(len(found), dtype=torch.int64, device="cpu")
        first[opened.starts(start, found)] = 1
        inside = first[:size].clone()
        inside[0] = 0
        at = torch.arange(size, device="cpu")
        labels = torch.full((self.length,), _NO_LABEL, device="cpu")
        labels[: len(found) - 1] = found[1:].where(first[1:] == 0, _NO_LABEL)
        return {
            "tokens": _padded(found[:size], self.length, 0),
            "labels": labels,
            "positions": _padded(at - (at * inside).cummax(0).values, self.length, 0),
            "documents": _padded(inside.cumsum(0), self.length, -1),
        }


def _padded(values: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)), value=value)


@attrs.frozen(kw_only=True, eq=False)
class _Opened:
    """Maps of a source.

    Attributes:
        path: The file that says where documents end.
        tokens: All of them.
        end: The token that ends a document.
        pointers: For every sequence, its first byte.
        bounds: For every document, its first sequence; then the number of sequences.
    """

    path: str
    tokens: Tensor
    end: int | None = None
    pointers: Tensor | None = None
    bounds: Tensor | None = None

    def starts(self, start: int, found: Tensor) -> Tensor:
        """Where documents start among the tokens from `start` on."""
        if self.pointers is None or self.bounds is None:
            ends = torch.empty(0, dtype=torch.int64, device="cpu")
            if self.end is not None:
                ends = (found[:-1] == self.end).nonzero().flatten()
            return ends + 1
        begin, stop = (
            bisect.bisect_left(range(len(self.bounds) - 1), at, key=self._first_token)
            for at in (start, start + len(found))
        )
        sequences = self.bounds[begin:stop]
        known = (sequences >= 0) & (sequences < len(self.pointers))
        pointers = self.pointers[sequences.where(known, 0)]
        starts = pointers // self.tokens.element_size() - start
        if not (known & (starts >= 0) & (starts < len(found))).all():
            raise _damaged(self.path, "has documents that are not in order")
        return starts

    def _first_token(self, document: int) -> int:
        assert self.pointers is not None and self.bounds is not None
        sequence = int(self.bounds[document])
        if not 0 <= sequence <= len(self.pointers):
            sequences = len(self.pointers)
            raise _damaged(
                self.path, f"starts document {document} at sequence {sequence} of {sequences}"
            )
        if sequence == len(self.pointers):
            return len(self.tokens)
        return int(self.pointers[sequence]) // self.tokens.element_size()


def _changed_ns(source: MegatronTokens | NanoGPTTokens) -> int:
    path = source.path if isinstance(source, NanoGPTTokens) else f"{source.path}.idx"
    try:
        return os.stat(path).st_mtime_ns
    except OSError as error:
        raise _unreadable(path, error) from error


@functools.lru_cache(maxsize=_OPEN_MAPS // 2)
def _opened(source: MegatronTokens | NanoGPTTokens, _changed_ns: int) -> _Opened:
    if isinstance(source, NanoGPTTokens):
        tokens = _all(source.path, getattr(torch, source.dtype))
        return _Opened(path=source.path, tokens=tokens, end=source.end)
    path = f"{source.path}.idx"
    index = _mapped(path)
    if len(index) < _HEAD.size:
        raise _damaged(path, f"has {len(index)} bytes, fewer than its header")
    magic, version, code, sequences, bounds = _HEAD.unpack_from(index)
    if magic != b"MMIDIDX\0\0" or version != 1 or code not in _CODES:
        raise _damaged(path, "is not an index of integers of version 1")
    size = _HEAD.size + 12 * sequences + 8 * bounds
    # Multimodal data has one more byte for each sequence.
    if not sequences or not bounds or len(index) not in (size, size + sequences):
        raise _damaged(
            path, f"has {len(index)} bytes; {sequences} sequences, {bounds} bounds need {size}"
        )
    at = _HEAD.size + 4 * sequences
    lengths = torch.frombuffer(index, dtype=torch.int32, count=sequences, offset=_HEAD.size)
    pointers = torch.frombuffer(index, dtype=torch.int64, count=sequences, offset=at)
    at += 8 * sequences
    starts = torch.frombuffer(index, dtype=torch.int64, count=bounds, offset=at)
    tokens = _all(f"{source.path}.bin", _CODES[code])
    expected = int(pointers[-1]) + int(lengths[-1]) * tokens.element_size()
    if expected != len(tokens) * tokens.element_size():
        raise _damaged(path, f"describes {expected} bytes of tokens, not those of its .bin file")
    return _Opened(path=path, tokens=tokens, pointers=pointers, bounds=starts)


def _all(path: str, dtype: torch.dtype) -> Tensor:
    data = _mapped(path)
    if len(data) % dtype.itemsize:
        raise _damaged(path, f"has {len(data)} bytes, which is no number of {dtype} tokens")
    return torch.frombuffer(data, dtype=dtype)


def _mapped(path: str) -> mmap.mmap:
    """The bytes of a file; a private map, as torch warns of buffers that are read-only."""
    try:
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                raise _damaged(path, "is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str, error: OSError) -> DataError:
    return DataError(f"tokens: cannot read {path}: {error.strerror}. Check the path.")


def _damaged(path: str, found: str) -> DataError:
    return DataError(f"tokens: {path} {found}. Check the format, or create the file again.")
