"""Reads an iterable dataset, one global batch at a time."""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from fxtrain._errors import DataError
from fxtrain.data.generators import BorrowedGenerators
from fxtrain.data.rank_slices import Layout

__all__ = ["StreamReader"]

_END = object()


class StreamReader:
    """An open stream, which looks ahead to know whether more rows follow.

    Rows of ranks that are not served here are replaced by None.

    Args:
        dataset: Iterable.
        layout: How rows make global batches.
        ranks: The served ranks.
        opened: (pass, epoch, rows to skip) for which it was opened.
        lent: Generators for the stream to draw from; None for the process's own.
    """

    def __init__(
        self,
        dataset: Any,
        layout: Layout,
        ranks: Sequence[int],
        opened: tuple[int, int, int],
        lent: BorrowedGenerators | None,
    ) -> None:
        self.opened, self.step, self.is_last = opened, 0, False
        self._dataset, self._layout, self._lent = dataset, layout, lent
        self._served = frozenset(ranks)
        self._rows: Iterator[Any] | None = None
        self._place = 0
        self._first: Any = None
        self._buffer: deque[Any] = deque()
        # With drop, a batch is not last only if a whole global batch follows it.
        self._look = layout.stride if layout.even == "drop" else 1

    def read(self, step: int) -> list[Any] | None:
        """The rows of a global batch, this one or a later one; None past the end."""
        stride = self._layout.stride
        with _hide_worker_info(), nullcontext() if self._lent is None else self._lent():
            while self.step < step and self._fill(stride):
                self._drop(stride)
                self.step += 1
            self._fill(stride + self._look)
        self.step += 1
        count = min(stride, len(self._buffer))
        if count == 0 or (count < stride and self._layout.even == "drop"):
            return None
        rows = [self._buffer.popleft() for _ in range(count)]
        self.is_last = len(self._buffer) < self._look
        return rows

    def head(self) -> list[Any]:
        """The first rows of the epoch, read again."""
        lent = None if self._lent is None else self._lent.again()
        with _hide_worker_info(), nullcontext() if lent is None else lent():
            found = list(itertools.islice(iter(self._dataset), self._layout.stride))
        # A stream that can be read only once yields nothing now.
        return found or [self._first]

    def _drop(self, count: int) -> None:
        for _ in range(min(count, len(self._buffer))):
            self._buffer.popleft()

    def _fill(self, count: int) -> bool:
        """Read until this many rows are buffered; whether there were any."""
        if self._rows is None:
            self._rows = iter(self._dataset)
        start, layout, buffer = self.opened[2], self._layout, self._buffer
        while len(buffer) < count:
            row = next(self._rows, _END)
            if row is _END:
                if self._place < start:
                    raise DataError(
                        f"The position has index {start}, but the stream ends at "
                        f"{self._place}: the position was made with other data.",
                        code="FX401",
                    )
                break
            if self._place == 0:
                self._first = row
            if self._place >= start:
                rank = (self._place - start) % layout.stride // layout.per_rank
                buffer.append(row if rank in self._served else None)
            self._place += 1
        return bool(buffer)


@contextmanager
def _hide_worker_info() -> Iterator[None]:
    """Hide from a dataset that it runs in one of several workers.

    A dataset that asks `get_worker_info` would skip the rows of other workers, which we
    do ourselves. Elsewhere torch still needs the answer: collating in a worker is faster.
    """
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info
