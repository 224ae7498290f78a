"""Reads an iterable dataset, one global batch at a time."""

import copy
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torch_worker

from fxtrain.data.rank_slices import Batching
from fxtrain.data.user_code import BorrowedGenerators
from fxtrain.errors import DataError

_END = object()


class StreamReader:
    """An open stream, which looks ahead to know whether more rows follow.

    Rows of ranks that are not served here are replaced by None.

    Args:
        batching: How rows make global batches.
        ranks: The served ranks.
        opened: (pass, epoch, rows to skip) for which it was opened.
        lent: Generators for the stream to draw from; None for the process's own.
        memory: How its state is read and restored.
        state: From which it continues; None reads and drops the rows to skip.
    """

    def __init__(
        self,
        batching: Batching,
        ranks: Sequence[int],
        opened: tuple[int, int, int],
        lent: BorrowedGenerators | None,
        memory: "StreamMemory",
        state: Any = None,
    ) -> None:
        self.opened, self.step, self.is_last = opened, 0, False
        self.state: Any = None
        self._batching, self._lent = batching, lent
        self._memory, self._from = memory, state
        # Rows of a batch that is ready are counted by whoever sees it.
        self._served = frozenset(range(batching.ranks) if batching.unit == "item" else ranks)
        self._rows: Iterator[Any] | None = None
        self._place = 0 if state is None else opened[2]
        self._first: Any = None
        self._buffer: deque[Any] = deque()
        # With drop, a batch is not last only if a whole global batch follows it.
        self._look = batching.stride if batching.even == "drop" else 1

    def read(self, step: int) -> list[Any] | None:
        """The rows of a global batch, this one or a later one; None past the end."""
        stride = self._batching.stride
        with _hide_worker_info(), nullcontext() if self._lent is None else self._lent():
            while self.step < step and self._fill(stride):
                self._drop(stride)
                self.step += 1
            if self._fill(stride):
                self.state = self._memory.state()
            self._fill(stride + self._look)
        self.step += 1
        count = min(stride, len(self._buffer))
        if count == 0 or (count < stride and self._batching.even == "drop"):
            return None
        rows = [self._buffer.popleft() for _ in range(count)]
        self.is_last = len(self._buffer) < self._look
        return rows

    def head(self) -> list[Any]:
        """The first rows of the epoch, read again."""
        lent = None if self._lent is None else self._lent.again()
        with _hide_worker_info(), nullcontext() if lent is None else lent():
            rows = list(itertools.islice(self._memory.again(), self._batching.stride))
        # A stream that can be read only once yields nothing now.
        return rows or [self._first]

    def _drop(self, count: int) -> None:
        for _ in range(min(count, len(self._buffer))):
            self._buffer.popleft()

    def _fill(self, count: int) -> bool:
        """Read until this many rows are buffered; whether there were any."""
        if self._rows is None:
            self._rows = self._memory.open(self._from)
        start, batching, buffer = self.opened[2], self._batching, self._buffer
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
                rank = (self._place - start) % batching.stride // batching.per_rank
                buffer.append(row if rank in self._served else None)
            self._place += 1
        return bool(buffer)


class PlainStream(IterableDataset[Any]):
    """Any iterable as a dataset.

    Attributes:
        rows: The iterable.
        once: Whether it is its own iterator, and so has one pass.
    """

    def __init__(self, rows: Any) -> None:
        self.rows, self._opened = rows, False
        self.once = not is_stateful(rows) and iter(rows) is rows

    def __iter__(self) -> Iterator[Any]:
        if self.once and self._opened:
            raise DataError(
                f"iterating: this loader reads a {type(self.rows).__name__}, which can be read "
                f"once, and this is its second pass. Pass an object whose __iter__ starts again, "
                f"such as a list or a dataset, or a function of the position."
            )
        self._opened = True
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def set_epoch(self, epoch: int) -> None:
        """Tell it the epoch, if it wants to know."""
        if callable(getattr(self.rows, "set_epoch", None)):
            self.rows.set_epoch(epoch)


class StreamMemory:
    """The state protocol of a dataset or of its iterator: `state_dict` and `load_state_dict`.

    A dataset that has it starts every epoch from the state in which it was passed.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._owner = dataset.rows if isinstance(dataset, PlainStream) else dataset
        self._rows: Any = None
        self._opened = False
        self._initial = copy.deepcopy(self._owner.state_dict()) if self._keeps_state() else None

    def open(self, state: Any = None) -> Iterator[Any]:
        """The rows from a state on, or from the start."""
        if self._keeps_state() and (state is not None or self._opened):
            own = self._initial if state is None else state["dataset"]
            self._owner.load_state_dict(copy.deepcopy(own))
        self._opened = True
        self._rows = rows = iter(self.dataset)
        if state is not None and self._has_iterator_state():
            rows.load_state_dict(copy.deepcopy(state["iterator"]))
        return rows

    def state(self) -> Any:
        """The state after the rows read so far; None if neither keeps one."""
        own = self._owner.state_dict() if self._keeps_state() else None
        of_iterator = self._rows.state_dict() if self._has_iterator_state() else None
        if not (self._keeps_state() or self._has_iterator_state()):
            return None
        return copy.deepcopy({"dataset": own, "iterator": of_iterator})

    def again(self) -> Iterator[Any]:
        """The rows from the start, to pad with; none of a stream that has one pass."""
        once = isinstance(self.dataset, PlainStream) and self.dataset.once
        return iter(()) if once else self.open()

    def _keeps_state(self) -> bool:
        return is_stateful(self._owner)

    def _has_iterator_state(self) -> bool:
        return self._rows is not self._owner and is_stateful(self._rows)


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
