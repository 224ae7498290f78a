"""Loaders that yield only this rank's rows, each to its own rank."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader, IterableDataset

from fxtrain import _tree
from fxtrain.data.fetch import StartWorker, call_set_epoch
from fxtrain.data.iterable import StreamMemory
from fxtrain.data.permutation import hash_key
from fxtrain.data.rank_slices import Batching
from fxtrain.data.sources import RowBatches, Source, row_source
from fxtrain.data.uneven_streams import UnevenStream, uneven_batches
from fxtrain.data.user_loader import LoaderSpec, read_loader, rebuild
from fxtrain.data.windows import Cursor
from fxtrain.errors import DataError
from fxtrain.state import DistContext, Plan, Position


def presharded_source(
    loader: DataLoader[Any], ctx: DistContext, plan: Plan
) -> tuple[Source, Batching]:
    """Batches of loaders that each yield one rank's rows only.

    Effects:
        One gather of a few numbers per global batch.

    Raises:
        DataError: the plan needs something that cannot be known for such loaders; on every rank.
    """
    reading = read_loader(loader, ctx.world_size, plan)
    if reading.batching.unit == "batch" and plan.batch == "global":
        raise DataError(
            'batch="global" with Data(source="sharded"): the batch sampler of this loader '
            'yields batches for one rank. Use batch="per_rank".'
        )
    # Each rank reads as if it were alone, so nothing is padded within a rank.
    even = "drop" if reading.batching.even == "drop" else "pad"
    reading = attrs.evolve(reading, batching=attrs.evolve(reading.batching, ranks=1, even=even))
    if isinstance(loader.dataset, IterableDataset):
        local = _stream(loader, reading, ctx, plan)
    else:
        local = _rows(loader, reading, ctx, plan)

    source = Source(
        run=lambda cursor: uneven_batches(local, cursor, ctx, plan),
        length=lambda: None,
        shuffled=local.shuffled,
        stateful=isinstance(loader.dataset, IterableDataset) and not loader.num_workers,
    )
    return source, reading.batching


def _rows(
    loader: DataLoader[Any], reading: LoaderSpec, ctx: DistContext, plan: Plan
) -> UnevenStream:
    """A map-style dataset that holds only this rank's rows; their order differs between ranks."""
    batches = RowBatches(reading, hash_key(plan.seed, "rank", ctx.rank))
    source = row_source(loader, batches, attrs.evolve(plan, even="pad"), (0,))

    def read(epoch: int, units: int, state: Any) -> Iterator[tuple[int, Any, Any]]:
        for (batch, _), (data,) in source.run(Cursor(Position(epoch=epoch, index=units))):
            yield batch.rows[0], data, None

    return UnevenStream(
        open=read,
        sizes=lambda epoch: (
            (batch.rows[0], batch.units)
            for batch in batches.cut(Cursor(Position(epoch=epoch)), (), plan.accumulate)
        ),
        most=None if reading.batching.unit == "batch" else reading.batching.per_rank,
        shuffled=batches.shuffled,
    )


def _stream(
    loader: DataLoader[Any], reading: LoaderSpec, ctx: DistContext, plan: Plan
) -> UnevenStream:
    """An iterable dataset that yields only this rank's (and, in workers, this worker's) rows."""
    dataset = _Dataset(loader.dataset)
    items = reading.batching.unit == "item"
    # A worker's state would have to reach the worker that continues its rows.
    memory = None if loader.num_workers else dataset.memory
    changes: dict[str, Any] = {"collate_fn": _Counted(loader.collate_fn, memory, items=items)}
    if loader.num_workers:
        dataset.epoch.share_memory_()
        changes["worker_init_fn"] = StartWorker(loader.worker_init_fn)
    size = None if items else reading.batching.per_rank
    drops = not items and reading.batching.even == "drop"
    over = rebuild(loader, dataset, batch_size=size, drop_last=drops, **changes)

    def read(epoch: int, units: int, state: Any) -> Iterator[tuple[int, Any, Any]]:
        assert units == 0, "a stream is read from its start, or from a state"
        dataset.epoch.fill_(epoch)
        dataset.state = state
        assert isinstance(over.generator, torch.Generator)
        over.generator.manual_seed(hash_key(plan.seed, epoch, "workers", ctx.rank))
        yield from over

    return UnevenStream(
        open=read,
        sizes=None,
        most=None if items else reading.batching.per_rank,
        shuffled=lambda: False,  # only the author of a stream knows whether it shuffles
    )


class _Dataset(IterableDataset[Any]):
    """The user's dataset, with `set_epoch` called also in persistent workers."""

    def __init__(self, dataset: Any) -> None:
        self.memory, self.state = StreamMemory(dataset), None
        self.epoch = torch.zeros(1, dtype=torch.int64, device="cpu")

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self.memory.dataset

    def __iter__(self) -> Iterator[Any]:
        call_set_epoch(self.dataset, int(self.epoch))
        return self.memory.open(self.state)


class _Counted:
    """The user's collate function, with the number of rows and the state of the stream there."""

    def __init__(
        self, collate: Callable[[Any], Any], memory: StreamMemory | None, *, items: bool
    ) -> None:
        self._collate, self._memory, self._items = collate, memory, items

    def __call__(self, rows: Any) -> tuple[int, Any, Any]:
        batch = self._collate(rows)
        count = _tree.row_count(batch) or 1 if self._items else len(rows)
        return count, batch, None if self._memory is None else self._memory.state()
