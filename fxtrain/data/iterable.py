"""Reads an iterable dataset, one global batch at a time."""

import copy
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils.data._utils import worker as torch_worker

from fxtrain._errors import DataError
from fxtrain.data.generators import BorrowedGenerators
from fxtrain.data.rank_slices import Layout

__all__ = ["StreamMemory", "StreamReader", "is_stateful"]

_END = object()


class StreamReader:
    """An open stream, which looks ahead to know whether more rows follow.

    Rows of ranks that are not served here are replaced by None.

    Args:
        layout: How rows make global batches.
        ranks: The served ranks.
        opened: (pass, epoch, rows to skip) for which it was opened.
        lent: Generators for the stream to draw from; None for the process's own.
        memory: How its state is read and restored.
        state: From which it continues; None reads and drops the rows to skip.
    """

    def __init__(
        self,
        layout: Layout,
        ranks: Sequence[int],
        opened: tuple[int, int, int],
        lent: BorrowedGenerators | None,
        memory: "StreamMemory",
        state: Any = None,
    ) -> None:
        self.opened, self.step, self.is_last = opened, 0, False
        self.state: Any = None
        self._layout, self._lent = layout, lent
        self._memory, self._from = memory, state
        # Rows of a batch that is ready are counted by whoever sees it.
        self._served = frozenset(range(layout.ranks) if layout.unit == "item" else ranks)
        self._rows: Iterator[Any] | None = None
        self._place = 0 if state is None else opened[2]
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
            if self._fill(stride):
                self.state = self._memory.state()
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
            found = list(itertools.islice(self._memory.open(), self._layout.stride))
        # A stream that can be read only once yields nothing now.
        return found or [self._first]

    def _drop(self, count: int) -> None:
        for _ in range(min(count, len(self._buffer))):
            self._buffer.popleft()

    def _fill(self, count: int) -> bool:
        """Read until this many rows are buffered; whether there were any."""
        if self._rows is None:
            self._rows = self._memory.open(self._from)
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


class StreamMemory:
    """The state protocol of a dataset or of its iterator: `state_dict` and `load_state_dict`.

    A dataset that has it starts every epoch from the state in which it was passed.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._rows: Any = None
        self._opened = False
        self._initial = copy.deepcopy(dataset.state_dict()) if is_stateful(dataset) else None

    def open(self, state: Any = None) -> Iterator[Any]:
        """The rows from a state on, or from the start."""
        dataset = self.dataset
        if is_stateful(dataset) and (state is not None or self._opened):
            own = self._initial if state is None else state["dataset"]
            dataset.load_state_dict(copy.deepcopy(own))
        self._opened = True
        self._rows = rows = iter(dataset)
        if state is not None and self._has_iterator_state():
            rows.load_state_dict(copy.deepcopy(state["iterator"]))
        return rows

    def state(self) -> Any:
        """The state after the rows read so far; None if neither keeps one."""
        rows, dataset = self._rows, self.dataset
        own = dataset.state_dict() if is_stateful(dataset) else None
        of_iterator = rows.state_dict() if self._has_iterator_state() else None
        if own is of_iterator is None:
            return None
        return copy.deepcopy({"dataset": own, "iterator": of_iterator})

    def _has_iterator_state(self) -> bool:
        return self._rows is not self.dataset and is_stateful(self._rows)


def is_stateful(stream: Any) -> bool:
    """Whether a dataset or an iterator has the state protocol."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(stream, name, None)) for name in names)


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
