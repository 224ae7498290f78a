"""Datasets that read and collate rows, in the loader's workers or in this process."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch.utils.data import Dataset, get_worker_info

from fxtrain import _tree
from fxtrain.data.iterable import PlainStream, StreamMemory, StreamReader
from fxtrain.data.order import hash_key
from fxtrain.data.rank_slices import Batching, GlobalBatch, global_batch
from fxtrain.data.user_code import BorrowedGenerators, seed_all
from fxtrain.errors import DataError


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
                seed_all(seeds[place])
            rows.append(self._load(key))
        return rows

    def _load(self, key: Any) -> Any:
        if not self.collates:
            return self.collate(self.dataset[key])
        if getattr(self.dataset, "__getitems__", None):
            return self.collate(self.dataset.__getitems__(key))
        return self.collate([self.dataset[index] for index in key])


class StreamRequest(NamedTuple):
    """One global batch of an iterable dataset.

    Attributes:
        run: Number of the pass; a new number restarts the stream.
        epoch: Its epoch.
        start: Rows of the epoch to skip.
        step: Number of the global batch, counted from there.
        state: Of the stream at `start`, where known.
    """

    run: int
    epoch: int
    start: int
    step: int
    state: Any = None


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
        self.ranks, self.seed = ranks, seed
        self.reader: StreamReader | None = None

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self.memory.dataset

    def __getitem__(self, ask: StreamRequest) -> tuple[GlobalBatch, bool, list[Any], Any] | None:
        reader = self.reader
        if reader is None or reader.opened != ask[:3] or reader.step > ask.step:
            reader = self.reader = self._open(ask)
        units = reader.read(ask.step)
        if units is None:
            return None
        first = ask.start + ask.step * self.batching.stride
        items = self.batching.unit == "item"
        ranks = range(self.batching.ranks) if items else self.ranks
        borrows = any(self.batching.borrows(rank, len(units)) for rank in ranks)
        head = reader.head() if borrows else units
        batch = global_batch(self.batching, first, units, head, ranks)
        data = [
            self._collate(rows, ask.epoch, first, rank)
            for rank, rows in zip(ranks, batch.keys, strict=True)
        ]
        if items:  # each is a batch that is ready
            counts = [self._count(batch) for batch in data]
            rows, sizes = (
                tuple(count * has for count, has in zip(counts, which, strict=True))
                for which in (batch.rows, batch.sizes)
            )
            batch, data = (
                batch._replace(rows=rows, sizes=sizes),
                [data[rank] for rank in self.ranks],
            )
        return batch._replace(keys=()), reader.is_last, data, reader.state

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

    def _open(self, ask: StreamRequest) -> StreamReader:
        call_set_epoch(self.dataset, ask.epoch)
        lent = None
        if self.seed is not None:
            lent = BorrowedGenerators(hash_key(self.seed, ask.epoch))
        return StreamReader(self.batching, self.ranks, ask[:3], lent, self.memory, ask.state)

    def _collate(self, rows: Any, epoch: int, first: int, rank: int) -> Any:
        if self.seed is not None:
            seed_all(fetch_key(self.batching, self.seed, epoch, first, rank))
        return self.collate(rows)


class StartWorker:
    """Runs the user's `worker_init_fn` in a worker that holds one of our datasets.

    There, `get_worker_info().dataset` is the user's own dataset, as without fxtrain.
    """

    def __init__(self, init_fn: Callable[[int], None] | None) -> None:
        self._init_fn = init_fn

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._init_fn is not None:
            self._init_fn(worker)


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
