"""Datasets that read and collate rows, in workers or in this process; streams with a state."""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import attrs
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from fxtrain import _tree
from fxtrain.data.dataset_uses import DatasetUse, DatasetUses
from fxtrain.data.order import BorrowedGenerators, hash_key
from fxtrain.data.order_texts import STREAM_ROWS, chained
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

    def __init__(
        self, dataset: Any, use: DatasetUse, collate: Callable[[Any], Any], *, collates: bool
    ) -> None:
        self.dataset, self.use, self.collate, self.collates = dataset, use, collate, collates
        self.epoch = -1

    def __getitem__(self, ask: tuple[int, tuple[Any, ...], tuple[int, ...]]) -> list[Any]:
        epoch, keys, seeds = ask
        # A worker has a copy of the dataset, which this process cannot call `set_epoch` of.
        if epoch != self.epoch:
            self.epoch = epoch
            self.use.set_epoch(self.dataset, epoch)
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
    """

    def __init__(self, rows: Any) -> None:
        self.rows, self._opened = rows, False

    def __iter__(self) -> Iterator[Any]:
        rows = iter(self.rows)
        # An iterator is its own `iter`: a second pass over it would have no rows, without an error.
        if rows is self.rows and self._opened and not is_stateful(rows):
            raise DataError(
                f"iterating: this loader reads a {type(self.rows).__name__}, which can be read "
                f"once, and this is its second pass. Pass an object whose __iter__ starts again, "
                f"such as a list or a dataset, or a function of the position."
            )
        self._opened = True
        return rows

    def __len__(self) -> int:
        return len(self.rows)

    def set_epoch(self, epoch: int) -> None:
        """Call its `set_epoch`, if it has one."""
        if callable(getattr(self.rows, "set_epoch", None)):
            self.rows.set_epoch(epoch)


@attrs.define(eq=False)
class _Pass:
    """One iteration of a stream."""

    known: Any  # the last state of it that was asked for, or that from which it began
    number: int = 0  # of times that the dataset was opened, this one included
    rows: Any = None
    since: int = 0  # rows read after the known state


class StreamMemory:
    """The state protocol of a dataset or of its iterator: `state_dict` and `load_state_dict`.

    A dataset that has it starts every epoch from the state in which it was first passed. All passes
    share the one state of the dataset. If another pass began meanwhile, such as an evaluation
    during training, the earlier pass opens the dataset again at its own row. A dataset without a
    state is opened once a pass.
    """

    def __init__(self, dataset: Any, uses: DatasetUses) -> None:
        self.dataset, self._owner = dataset, owner_of(dataset)
        self._pass = _Pass(None)  # the one that read last
        self._use = uses.of(self._owner)
        if self._keeps_state() and not self._use.is_known:
            # Reading changes the state: each loader of the dataset starts where the first one did.
            self._use.start, self._use.is_known = copy.deepcopy(self._owner.state_dict()), True

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the dataset, if it has one."""
        self._use.set_epoch(self.dataset, epoch)

    def open(self, epoch: int, state: Any = None) -> Iterator[Any]:
        """The rows of an epoch from a state on, or from the start; none after the end."""
        one, use = _Pass(state), self._use
        self.set_epoch(epoch)
        self._begin(one)
        while True:
            if use.epoch is not None and use.epoch != epoch:  # another pass has set it
                self.set_epoch(epoch)
            self._return_to(one)
            # `state` is asked for between two rows, and is that of the pass that read the last.
            self._pass = one
            try:
                row = next(one.rows)
            except StopIteration:
                return
            one.since += 1
            yield row

    def _return_to(self, one: _Pass) -> None:
        """Open the dataset again at the row of a pass, if another one has begun since then."""
        if one.number != self._use.openings:
            self._begin(one)
            # Rows since the known state have none of their own, and are read once more.
            for _ in itertools.islice(one.rows, one.since):
                pass

    def _begin(self, one: _Pass) -> None:
        """Open the dataset at the known state of a pass."""
        state = one.known
        if self._keeps_state():
            if state is not None or self._use.openings:
                # A copy, since a dataset may keep what it loads, and change it while it reads.
                own = self._use.start if state is None else state["dataset"]
                self._owner.load_state_dict(copy.deepcopy(own))
            self._use.openings += 1
        one.rows, one.number = iter(self.dataset), self._use.openings
        if state is not None and self._has_iterator_state(one.rows):
            one.rows.load_state_dict(copy.deepcopy(state["iterator"]))

    def state(self) -> Any:
        """The state of the pass that read last, after its rows; None if there is none."""
        one = self._pass
        if one.number:
            self._return_to(one)
        own = self._owner.state_dict() if self._keeps_state() else None
        of_iterator = one.rows.state_dict() if self._has_iterator_state(one.rows) else None
        if not (self._keeps_state() or self._has_iterator_state(one.rows)):
            return None
        one.known, one.since = copy.deepcopy({"dataset": own, "iterator": of_iterator}), 0
        return one.known

    def _keeps_state(self) -> bool:
        return is_stateful(self._owner)

    def _has_iterator_state(self, rows: Any) -> bool:
        return rows is not self._owner and is_stateful(rows)


def owner_of(dataset: Any) -> Any:
    """The object that the user passed: a dataset, or an iterable that has none."""
    return dataset.rows if isinstance(dataset, PlainStream) else dataset


def is_stateful(stream: Any) -> bool:
    """Whether a dataset or an iterator has the state protocol, and its state is all of it."""
    names = ("state_dict", "load_state_dict")
    has = all(callable(getattr(stream, name, None)) for name in names)
    return has and not has_shuffle_buffer(stream)


def has_shuffle_buffer(stream: Any) -> bool:
    """Whether a stream of Hugging Face shuffles in a buffer, whose rows its state leaves out."""
    steps = [getattr(stream, "_ex_iterable", None)]
    for step in steps:
        if step is not None:
            if "BufferShuffled" in type(step).__name__:
                return True
            steps += [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())]
    return False


class StreamRequest(NamedTuple):
    """What is asked of a stream: one of the global batches of a pass."""

    number: int  # of the pass; a new one opens the stream
    epoch: int
    start: int  # rows before the first batch of the pass
    order: str  # the text of the stream there; empty if it is unknown
    step: int  # the batch, counted from there
    state: Any  # of the stream at the start of the pass, where it is known


class StreamBatch(NamedTuple):
    """What a stream answers."""

    batch: GlobalBatch  # without keys
    is_last: bool
    data: list[Any]  # the collated rows of each served rank
    state: Any  # of the stream just after the batch, where it keeps one
    began: str  # the text of the stream at the start of the pass; empty if it is not read again
    order: str  # that just after the batch


class StreamFetch(Dataset["StreamBatch | None"]):
    """An iterable dataset whose items are global batches, requested by number; None past its end.

    Row i of the stream belongs to global batch i // stride, whichever worker serves it: each
    worker reads the whole stream and keeps the rows that its ranks need.

    Args:
        seed: Seeds the random numbers that the stream draws, by (seed, epoch), so that a stream
            that shuffles is the same on all ranks and workers. None leaves the generators alone.
        reseeds: Whether the numbers that the collate function draws are seeded too, by the index
            of its rows as well.
    """

    def __init__(
        self,
        memory: StreamMemory,
        collate: Callable[[Any], Any],
        batching: Batching,
        ranks: Sequence[int],
        seed: int | None,
        *,
        reseeds: bool,
    ) -> None:
        self.memory, self.collate, self.batching = memory, collate, batching
        # Rows of a batch that is ready are counted by whoever sees it.
        self.served = range(batching.ranks) if batching.unit == "item" else ranks
        self.ranks, self.seed, self.reseeds = ranks, seed, reseeds
        self.close()

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self.memory.dataset

    def close(self) -> None:
        """Close the stream, if this process holds it."""
        self._number: int | None = None  # of the pass
        self._batches: Iterator[tuple[list[Any], bool, Any, str, str]] = iter(())
        self._step = self._wanted = 0

    def __getitem__(self, ask: StreamRequest) -> StreamBatch | None:
        self._wanted = ask.step
        if ask.number != self._number:
            self._number, self._step, self._batches = ask.number, 0, self._read(ask)
        found = None
        # A stream has no random access: the batches of other workers are read and dropped.
        while self._step <= self._wanted:
            found, self._step = next(self._batches, None), self._step + 1
        if found is None:
            return None
        units, is_last, state, began, order = found
        first = ask.start + self._wanted * self.batching.stride
        batch = global_batch(self.batching, first, units, self.served)
        data = [
            self._collate(rows, ask.epoch, first, rank)
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
        return StreamBatch(batch._replace(keys=()), is_last, data, state, began, order)

    def _read(self, ask: StreamRequest) -> Iterator[tuple[list[Any], bool, Any, str, str]]:
        """The rows of each global batch, and the other fields of `StreamBatch`.

        It looks ahead to know whether more rows follow. Rows of ranks that are not served are
        replaced by None, but for the first of a batch, of which padding may be made.
        """
        stride, size, start = self.batching.stride, self.batching.per_rank, ask.start
        drops, buffer = self.batching.even == "drop", deque[Any]()
        # With drop, a batch is not last only if a whole global batch follows it.
        look = stride if drops else 1
        place, borrowed = 0 if ask.state is None else start, self._borrowed(ask.epoch)
        rows, text = self.memory.open(ask.epoch, ask.state), ask.order if place else ""
        hashed = STREAM_ROWS if not place or text else 0
        began, orders = text, deque[str]()  # the text after each row in the buffer

        def fill(count: int) -> None:
            nonlocal place, text, began
            for row in itertools.islice(rows, max(0, start - place) + count - len(buffer)):
                if place < hashed:
                    text = chained(text, row)
                if place >= start:
                    at = (place - start) % stride
                    buffer.append(row if at == 0 or at // size in self.served else None)
                    orders.append(text)
                place += 1
                if place == start:
                    began = text
            if place < start:
                raise DataError(
                    f"The position has index {start}, but the stream ends at {place}: the "
                    f"position was made with other data.",
                    code="FX401",
                )

        for step in itertools.count():
            state = None
            with _hide_worker_info(), borrowed():
                fill(stride)
                # Before rows are read ahead, so that the state is that just after this batch.
                if buffer and step == self._wanted:
                    state = self.memory.state()
                fill(stride + look)
            units = [buffer.popleft() for _ in range(min(stride, len(buffer)))]
            if not units or (len(units) < stride and drops):
                return
            order = [orders.popleft() for _ in units][-1]
            yield units, len(buffer) < look, state, began, order

    def _borrowed(self, epoch: int) -> Callable[[], AbstractContextManager[None]]:
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
        if self.reseeds:
            assert self.seed is not None
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
    # torch's WorkerInfo refuses assignments.
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
