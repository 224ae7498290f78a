"""Loaders that yield only this rank's rows, each to its own rank."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import attrs
import torch
from torch.utils.data import DataLoader, IterableDataset

from fxtrain import _tree, ops
from fxtrain.data.fetch import StartWorker, StreamMemory, call_set_epoch
from fxtrain.data.order import hash_key
from fxtrain.data.rank_slices import Batching, Cursor, GlobalBatch, Step, advance
from fxtrain.data.sources import Source, cut_order, row_source
from fxtrain.data.user_loader import read_loader, rebuild
from fxtrain.errors import DataError
from fxtrain.ops.plan_agreement import check_same_plan
from fxtrain.ops.same_errors import fail_together
from fxtrain.state import DistContext, Plan, Position

_HAS, _ENDED, _FAILED = range(3)  # states of a rank
_CHUNK = 1 << 12  # batches whose sizes are exchanged at a time


# One batch of a rank: its rows, its data, and the state of the rank's stream after it.
_Loaded = tuple[int, Any, Any]
# (epoch, units to skip, state or None) → every batch that follows; from a state on, nothing is
# skipped.
_Open = Callable[[int, int, Any], Iterator[_Loaded]]
# (epoch) → (rows, units) of every batch, without reading it; None if only reading tells, and then
# no units are skipped.
_Sizes = Callable[[int], Iterator[tuple[int, int]]] | None


class _Turn(NamedTuple):
    """What one rank contributes to a global batch."""

    state: int
    size: int = 0
    data: Any = None
    stream: Any = None
    error: Exception | None = None


def presharded_source(
    loader: DataLoader[Any], ctx: DistContext, plan: Plan
) -> tuple[Source, Batching]:
    """Batches of loaders that each yield one rank's rows only.

    Effects:
        One gather of a few numbers per global batch.

    Raises:
        DataError: the plan needs something that cannot be known for such loaders; on every rank.
    """
    batching, sampler = read_loader(loader, ctx.world_size, plan)
    if batching.unit == "batch" and plan.batch == "global":
        raise DataError(
            'batch="global" with Data(source="sharded"): the batch sampler of this loader '
            'yields batches for one rank. Use batch="per_rank".'
        )
    # Each rank reads as if it were alone, so nothing is padded within a rank.
    even = "drop" if batching.even == "drop" else "pad"
    batching = attrs.evolve(batching, ranks=1, even=even)
    if isinstance(loader.dataset, IterableDataset):
        read, sizes, rows = _stream(loader, batching, ctx, plan), None, None
    else:
        read, sizes, rows = _rows(loader, sampler, batching, ctx, plan)
    source = Source(
        run=lambda cursor: uneven_batches(read, sizes, cursor, ctx, plan),
        length=lambda: None,
        # Only the author of a stream knows whether it shuffles.
        shuffled=lambda: rows is not None and rows.shuffled(),
        stateful=rows is None and not loader.num_workers,
        endless=rows is not None and rows.endless,
    )
    return source, batching


def _rows(
    loader: DataLoader[Any], sampler: Any, batching: Batching, ctx: DistContext, plan: Plan
) -> tuple[_Open, _Sizes, Source]:
    """A map-style dataset that holds only this rank's rows; their order differs between ranks."""
    own = attrs.evolve(plan, even="pad", seed=hash_key(plan.seed, "rank", ctx.rank))
    source = row_source(loader, sampler, batching, own, (0,))

    def read(epoch: int, units: int, state: Any) -> Iterator[_Loaded]:
        for (batch, _), (data,) in source.run(Cursor(Position(epoch=epoch, index=units))):
            yield batch.rows[0], data, None

    def sizes(epoch: int) -> Iterator[tuple[int, int]]:
        _, batches = cut_order(sampler, batching, Cursor(Position(epoch=epoch)), (), own)
        return ((batch.rows[0], batch.units) for batch in batches)

    return read, sizes, source


def _stream(loader: DataLoader[Any], batching: Batching, ctx: DistContext, plan: Plan) -> _Open:
    """An iterable dataset that yields only this rank's (and, in workers, this worker's) rows."""
    dataset = _Dataset(loader.dataset)
    items = batching.unit == "item"
    # A worker's state would have to reach the worker that continues its rows.
    memory = None if loader.num_workers else dataset.memory
    changes: dict[str, Any] = {"collate_fn": _Counted(loader.collate_fn, memory, items=items)}
    if loader.num_workers:
        dataset.epoch.share_memory_()
        changes["worker_init_fn"] = StartWorker(loader.worker_init_fn)
    size = None if items else batching.per_rank
    drops = not items and batching.even == "drop"
    over = rebuild(loader, dataset, batch_size=size, drop_last=drops, **changes)

    def read(epoch: int, units: int, state: Any) -> Iterator[_Loaded]:
        assert units == 0, "a stream is read from its start, or from a state"
        dataset.epoch.fill_(epoch)
        dataset.state = state
        assert isinstance(over.generator, torch.Generator)
        over.generator.manual_seed(hash_key(plan.seed, epoch, "workers", ctx.rank))
        yield from over

    return read


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


def uneven_batches(
    read: _Open, sizes: _Sizes, cursor: Cursor, ctx: DistContext, plan: Plan
) -> Iterator[tuple[Step, tuple[Any]]]:
    """Global batches made of one batch of every rank.

    Under `pad`, a rank whose data has ended repeats it until all have ended. Under `uneven`
    likewise, but these batches have size 0 and count for nothing. Under `drop`, the first rank
    that ends stops all.

    Effects:
        Compares the plans; then one gather per global batch, one batch ahead, and two after some
        ranks have ended.

    Raises:
        DataError: a rank has no data, or the cursor does not match; on every rank.
        PlanError: the ranks pass different plans; on every rank.
        Exception: whatever a rank's loader raised; on other ranks a CollectiveError that names it.
    """
    check_same_plan("iterating", ctx, plan, {})
    epoch, position = cursor.position.epoch, cursor.position
    batches, behind = _seek(read, sizes, cursor, ctx)
    own = _turns(batches, _HAS)
    # Padding, too, continues where it was.
    again = itertools.islice(_turns(_repeat(read, epoch), _ENDED), behind, None)
    ends = any if plan.even == "drop" else all
    now = next(own)
    table = _gather_sizes(now, ctx)
    if ends(state != _HAS for state, _ in table):
        return
    for number in itertools.count():
        ended = now.state != _HAS
        if any(state != _HAS for state, _ in table):
            now = next(again) if ended else now
            behind += ended
            table = _gather_sizes(now, ctx)
            _refuse_empty(table, ctx)
        after = next(own)
        coming = _gather_sizes(after, ctx)
        is_last = ends(state != _HAS for state, _ in coming)
        rows = tuple(size if state == _HAS else 0 for state, size in table)
        padded = rows if plan.even == "uneven" else tuple(size for _, size in table)
        batch = GlobalBatch(number, sum(rows), rows, padded, ())
        position = advance(position, batch, plan, is_last=is_last)
        state = None
        if ended or now.stream is not None:
            state = {"stream": None if ended else now.stream, "behind": behind}
        yield (batch, Cursor(position, state)), (now.data,)
        if is_last:
            return
        now, table = after, coming


def _turns(batches: Iterator[_Loaded], state: int) -> Iterator[_Turn]:
    """One turn per batch, then empty ones forever; a failure is a turn too."""
    try:
        for size, data, stream in batches:
            yield _Turn(state, size, data, stream)
    except Exception as error:
        yield _Turn(_FAILED, error=error)
    while True:
        yield _Turn(_ENDED)


def _repeat(read: _Open, epoch: int) -> Iterator[_Loaded]:
    """This rank's epoch from its start, repeatedly; nothing if it is empty."""
    has_data = True
    while has_data:
        has_data = False
        for batch in read(epoch, 0, None):
            has_data = True
            yield batch


def _seek(
    read: _Open, sizes: _Sizes, cursor: Cursor, ctx: DistContext
) -> tuple[Iterator[_Loaded], int]:
    """This rank's batches from where all ranks together have seen this many rows.

    Returns:
        The batches, and how many padding batches preceded them.
    """
    epoch, wanted = cursor.position.epoch, cursor.position.index
    if cursor.state is not None:
        stream, behind = cursor.state["stream"], cursor.state["behind"]
        return iter(()) if stream is None else read(epoch, 0, stream), behind
    if wanted == 0:
        return read(epoch, 0, None), 0
    opened = None if sizes else read(epoch, 0, None)
    # Of each batch, rows and units. What was read of a stream is gone, so one is read at a time.
    source = sizes(epoch) if sizes else ((rows, rows) for rows, *_ in opened or ())
    chunk = _CHUNK if sizes else 1
    units = seen = behind = 0
    while seen < wanted:
        with fail_together(ctx):
            mine = list(itertools.islice(source, chunk))
        of_ranks = ops.gather_objects([rows for rows, _ in mine], ctx)
        if not any(of_ranks):
            break
        for step, rows in enumerate(itertools.zip_longest(*of_ranks, fillvalue=0)):
            if seen < wanted:
                seen += sum(rows)
                units += mine[step][1] if step < len(mine) else 0
                behind += step >= len(mine)
    if seen != wanted:
        raise DataError(
            f"The position has index {wanted}, which is not a boundary between two global batches "
            f'of these loaders. Data(source="sharded") can only resume with the world size, batch '
            f"size and data with which the position was made.",
            code="FX401",
        )
    return (read(epoch, units, None) if opened is None else opened), behind


def _gather_sizes(turn: _Turn, ctx: DistContext) -> list[tuple[int, int]]:
    """Every rank's (state, size).

    Raises:
        Exception: whatever a rank's loader raised; on other ranks a CollectiveError that names it.
    """
    mine = torch.tensor([[turn.state, turn.size]], device="cpu")
    table: list[list[int]] = ops.gather(mine, ctx).tolist()
    if any(state == _FAILED for state, _ in table):
        ops.raise_together(turn.error, ctx)
    return [(state, size) for state, size in table]


def _refuse_empty(table: list[tuple[int, int]], ctx: DistContext) -> None:
    empty = [rank for rank, (state, size) in enumerate(table) if state != _HAS and not size]
    if empty:
        raise DataError(
            f'Data(source="sharded"): the loaders of ranks {empty} of {ctx.world_size} yield '
            f"no rows, so there is nothing to pad with. Give every rank rows, or "
            f'use even="drop".'
        )
