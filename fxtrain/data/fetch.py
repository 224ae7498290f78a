"""Datasets that read and collate rows, in workers or in this process; streams with a state."""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from fxtrain import _tree
from fxtrain.data.order import BorrowedGenerators, hash_key
from fxtrain.data.rank_slices import Batching, GlobalBatch, global_batch
from fxtrain.errors import DataError
from fxtrain.ops.devices import seed_host


class RowFetch(Dataset[list[Any]]):
    """A map-style dataset whose items are global batches.

    An item is asked for by its epoch, the indices of each served rank, and the seed of the
    generators of each, or none to leave them alone. Random numbers drawn while loading depend only
    on (seed, epoch, index), and not on which worker loads, on what it loaded before, or on how
    often the run was restarted.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, collates: bool) -> None:
        self.dataset, self.collate, self.collates = dataset, collate, collates
        self.epoch = -1

    def __getitem__(self, ask: tuple[int, tuple[Any, ...], tuple[int, ...]]) -> list[Any]:
        epoch, keys, seeds = ask
        if epoch != self.epoch:
            self.epoch = epoch
            call_set_epoch(self.dataset, epoch)
        rows: list[Any] = []
        for place, key in enumerate(keys):
            if seeds:
                seed_host(seeds[place])
            rows.append(self._load(key))
        return rows

    def _load(self, key: Any) -> Any:
        if not self.collates:
            return self.collate(self.dataset[key])
        if getattr(self.dataset, "__getitems__", None):
            return self.collate(self.dataset.__getitems__(key))
        return self.collate([self.dataset[index] for index in key])


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


# Attributes of a dataset: its state when it was first passed, how often it was opened, and the
# epoch that it was told.
_START, _PASSES, EPOCH = "_fxtrain_start", "_fxtrain_passes", "_fxtrain_epoch"


@attrs.define(eq=False)
class _Pass:
    """One iteration of a stream."""

    known: Any  # the last state of it that was asked for, or that from which it began
    number: int | None = None  # of times that the dataset was opened, this one included
    rows: Any = None
    since: int = 0  # rows read after the known state


class StreamMemory:
    """The state protocol of a dataset or of its iterator: `state_dict` and `load_state_dict`.

    A dataset that has it starts every epoch from the state in which it was first passed. All passes
    share the one state of the dataset. If another pass began meanwhile, such as an evaluation
    during training, the earlier pass opens the dataset again at its own row.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._owner = dataset.rows if isinstance(dataset, PlainStream) else dataset
        self._pass = _Pass(None)  # the one that read last
        self._opened, self._initial = False, None
        if self._keeps_state():
            # Reading changes the state, and not equally on all ranks: each loader of the dataset
            # starts where the first one did.
            self._opened = _START in self._marks
            start = copy.deepcopy(self._owner.state_dict())
            self._initial = self._marks.setdefault(_START, start)

    @property
    def _marks(self) -> dict[str, Any]:
        return getattr(self._owner, "__dict__", {})

    def open(self, state: Any = None) -> Iterator[Any]:
        """The rows from a state on, or from the start; none after the end."""
        one, marks = _Pass(state), self._marks
        self._begin(one)
        while True:
            if one.number != marks.get(_PASSES):
                self._begin(one)
                for _ in itertools.islice(one.rows, one.since):
                    pass
            self._pass = one
            try:
                row = next(one.rows)
            except StopIteration:
                return
            one.since += 1
            yield row

    def _begin(self, one: _Pass) -> None:
        """Open the dataset at the known state of a pass."""
        state = one.known
        if self._keeps_state():
            if state is not None or self._opened:
                own = self._initial if state is None else state["dataset"]
                self._owner.load_state_dict(copy.deepcopy(own))
            self._marks[_PASSES] = self._marks.get(_PASSES, 0) + 1
        self._opened, one.rows, one.number = True, iter(self.dataset), self._marks.get(_PASSES)
        if state is not None and self._has_iterator_state(one.rows):
            one.rows.load_state_dict(copy.deepcopy(state["iterator"]))

    def state(self) -> Any:
        """The state of the pass that read last, after its rows; None if there is none."""
        one = self._pass
        own = self._owner.state_dict() if self._keeps_state() else None
        of_iterator = one.rows.state_dict() if self._has_iterator_state(one.rows) else None
        if not (self._keeps_state() or self._has_iterator_state(one.rows)):
            return None
        one.known, one.since = copy.deepcopy({"dataset": own, "iterator": of_iterator}), 0
        return one.known

    def again(self) -> Iterator[Any]:
        """The rows from the start, to pad with; none of a stream that has one pass."""
        once = isinstance(self.dataset, PlainStream) and self.dataset.once
        return iter(()) if once else self.open()

    def _keeps_state(self) -> bool:
        return is_stateful(self._owner)

    def _has_iterator_state(self, rows: Any) -> bool:
        return rows is not self._owner and is_stateful(rows)


def is_stateful(stream: Any) -> bool:
    """Whether a dataset or an iterator has the state protocol."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(stream, name, None)) for name in names)


# What is asked of a stream: (number of the pass, epoch, rows of it to skip), of which a new one
# opens the stream again; the number of the global batch, counted from there; and the state of the
# stream there, where it is known.
StreamRequest = tuple[tuple[int, int, int], int, Any]


class StreamFetch(Dataset["tuple[GlobalBatch, bool, list[Any], Any] | None"]):
    """An iterable dataset whose items are global batches, requested by number.

    An item is a batch without keys, whether it is the last, the collated rows of each served rank,
    and the state of the stream just after the batch, where it keeps one; None past the end.
    Row i of the stream belongs to global batch i // stride, whichever worker serves it: each
    worker reads the whole stream and keeps the rows that its ranks need.

    Args:
        seed: Seeds the random numbers that the stream draws, by (seed, epoch), so that a stream
            that shuffles is the same on all ranks and workers; and those that the collate
            function draws, by their index as well. None leaves the generators alone.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        batching: Batching,
        ranks: Sequence[int],
        seed: int | None,
    ) -> None:
        self.memory, self.collate, self.batching = StreamMemory(dataset), collate, batching
        # Rows of a batch that is ready are counted by whoever sees it.
        self.served = range(batching.ranks) if batching.unit == "item" else ranks
        self.ranks, self.seed = ranks, seed
        self.close()

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self.memory.dataset

    def close(self) -> None:
        """Close the stream, if this process holds it."""
        self._opened: Any = None
        self._batches: Iterator[tuple[list[Any], bool, Any]] = iter(())
        self._step = self._wanted = 0
        self._first: Any = None

    def __getitem__(self, ask: StreamRequest) -> tuple[GlobalBatch, bool, list[Any], Any] | None:
        opened, self._wanted, state = ask
        _, epoch, start = opened
        if opened != self._opened or self._step > self._wanted:
            call_set_epoch(self.dataset, epoch)
            self._opened, self._step = opened, 0
            self._batches = self._read(epoch, start, state)
        batch = None
        while self._step <= self._wanted:
            batch, self._step = next(self._batches, None), self._step + 1
        if batch is None:
            return None
        units, is_last, state = batch
        first = start + self._wanted * self.batching.stride
        borrows = any(self.batching.borrows(rank, len(units)) for rank in self.served)
        head = self._head(epoch) if borrows else units
        batch = global_batch(self.batching, first, units, head, self.served)
        data = [
            self._collate(rows, epoch, first, rank)
            for rank, rows in zip(self.served, batch.keys, strict=True)
        ]
        if self.batching.unit == "item":  # each is a batch that is ready
            counts = [self._count(batch) for batch in data]
            rows, sizes = (
                tuple(count * has for count, has in zip(counts, which, strict=True))
                for which in (batch.rows, batch.sizes)
            )
            batch, data = (
                batch._replace(rows=rows, sizes=sizes),
                [data[rank] for rank in self.ranks],
            )
        return batch._replace(keys=()), is_last, data, state

    def _read(self, epoch: int, start: int, state: Any) -> Iterator[tuple[list[Any], bool, Any]]:
        """The rows of each global batch, whether it is the last, and the state after it.

        It looks ahead to know whether more rows follow. Rows of ranks that are not served are
        replaced by None.
        """
        stride, size = self.batching.stride, self.batching.per_rank
        drops, buffer = self.batching.even == "drop", deque[Any]()
        # With drop, a batch is not last only if a whole global batch follows it.
        look = stride if drops else 1
        place, lent = 0 if state is None else start, self._lent(epoch)
        rows = self.memory.open(state)

        def fill(count: int) -> None:
            nonlocal place
            for row in itertools.islice(rows, max(0, start - place) + count - len(buffer)):
                if place == 0:
                    self._first = row
                if place >= start:
                    rank = (place - start) % stride // size
                    buffer.append(row if rank in self.served else None)
                place += 1
            if place < start:
                raise DataError(
                    f"The position has index {start}, but the stream ends at {place}: the "
                    f"position was made with other data.",
                    code="FX401",
                )

        for step in itertools.count():
            state = None
            with _hide_worker_info(), lent():
                fill(stride)
                if buffer and step == self._wanted:
                    state = self.memory.state()
                fill(stride + look)
            units = [buffer.popleft() for _ in range(min(stride, len(buffer)))]
            if not units or (len(units) < stride and drops):
                return
            yield units, len(buffer) < look, state

    def _head(self, epoch: int) -> list[Any]:
        """The first rows of the epoch, read again."""
        with _hide_worker_info(), self._lent(epoch)():
            rows = list(itertools.islice(self.memory.again(), self.batching.stride))
        # A stream that can be read only once yields nothing now.
        return rows or [self._first]

    def _lent(self, epoch: int) -> Callable[[], AbstractContextManager[None]]:
        """Generators for the stream to draw from, in their initial state."""
        if self.seed is None:
            return nullcontext
        return BorrowedGenerators(hash_key(self.seed, epoch))

    def _count(self, batch: Any) -> int:
        """The rows of a batch that is ready."""
        count = _tree.row_count(batch)
        if count is None and isinstance(self.dataset, PlainStream):
            raise DataError(
                f"iterating: without batch_size, this loader takes batches that are ready, and "
                f"found {type(batch).__name__}, without a tensor of rows. For single rows, use "
                f"fx.shard(rows, ctx, plan, batch_size=32)."
            )
        return count or 1

    def _collate(self, rows: Any, epoch: int, first: int, rank: int) -> Any:
        if self.seed is not None:
            seed_host(fetch_key(self.batching, self.seed, epoch, first, rank))
        return self.collate(rows)


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


def start_worker(init_fn: Callable[[int], None] | None, worker: int) -> None:
    """Run the user's `worker_init_fn` in a worker that holds one of our datasets.

    There, `get_worker_info().dataset` is the user's own dataset, as without fxtrain.
    """
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if init_fn is not None:
        init_fn(worker)


def fetch_key(batching: Batching, seed: int, epoch: int, first: int, rank: int) -> int:
    """The seed of the generators for one rank's part of a global batch.

    It depends on the index of the part's first unit only, so that the same rows get the same
    random numbers at every world size at which they are collated together.
    """
    if batching.shared:
        return hash_key(seed, epoch, first, rank)
    return hash_key(seed, epoch, first + rank * batching.per_rank)


def collate_nothing(rows: Any) -> Any:
    """Return data unchanged: the fetch has collated it."""
    return rows


def call_set_epoch(dataset: Any, epoch: int) -> None:
    """Call a dataset's `set_epoch`, if it has one."""
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
        getattr(dataset, "__dict__", {})[EPOCH] = epoch
