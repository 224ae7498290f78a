"""Loaders that yield only this rank's rows, each to its own rank."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader, IterableDataset

from fxtrain import _tree, ops
from fxtrain.data.fetch import StartWorker, call_set_epoch
from fxtrain.data.iterable import StreamMemory
from fxtrain.data.order import hash_key
from fxtrain.data.rank_slices import Batching, Cursor, GlobalBatch, Step, advance
from fxtrain.data.sources import RowBatches, Source, row_source
from fxtrain.data.user_loader import LoaderSpec, read_loader, rebuild
from fxtrain.errors import DataError
from fxtrain.ops.plan_agreement import check_same_plan
from fxtrain.ops.same_errors import fail_together
from fxtrain.state import DistContext, Plan, Position

_HAS, _ENDED, _FAILED = range(3)  # states of a rank


@attrs.frozen(kw_only=True, eq=False)
class UnevenStream:
    """One rank's own batches.

    Attributes:
        open: (epoch, units to skip, state or None) → (rows, data, state after it) of every batch
            that follows; from a state on, nothing is skipped.
        sizes: (epoch) → (rows, units) of every batch without reading it; None if only
            reading tells, and then `open` skips nothing.
        most: Maximum rows in a batch; None if unknown.
        shuffled: Whether epochs differ in their order, as far as is known so far.
    """

    open: Callable[[int, int, Any], Iterator[tuple[int, Any, Any]]]
    sizes: Callable[[int], Iterator[tuple[int, int]]] | None
    most: int | None
    shuffled: Callable[[], bool]


@attrs.frozen
class _RankBatch:
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


def uneven_batches(
    local: UnevenStream, cursor: Cursor, ctx: DistContext, plan: Plan
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
    batches, behind = _seek(local, cursor, ctx)
    own = _rank_batches(batches, _HAS)
    # Padding, too, continues where it was.
    again = itertools.islice(_rank_batches(_repeat(local, epoch), _ENDED), behind, None)
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
        batch = _global_batch(number, table, plan)
        position = advance(position, batch, plan, is_last=is_last)
        state = None
        if ended or now.stream is not None:
            state = {"stream": None if ended else now.stream, "behind": behind}
        yield (batch, Cursor(position, state)), (now.data,)
        if is_last:
            return
        now, table = after, coming


def _global_batch(number: int, table: list[tuple[int, int]], plan: Plan) -> GlobalBatch:
    rows = tuple(size if state == _HAS else 0 for state, size in table)
    sizes = rows if plan.even == "uneven" else tuple(size for _, size in table)
    return GlobalBatch(number, sum(rows), rows, sizes, ())


def _rank_batches(batches: Iterator[tuple[int, Any, Any]], state: int) -> Iterator[_RankBatch]:
    """One turn per batch, then empty ones forever; a failure is a turn too."""
    try:
        for size, data, stream in batches:
            yield _RankBatch(state, size, data, stream)
    except Exception as error:
        yield _RankBatch(_FAILED, error=error)
    while True:
        yield _RankBatch(_ENDED)


def _repeat(local: UnevenStream, epoch: int) -> Iterator[tuple[int, Any, Any]]:
    """This rank's epoch from its start, repeatedly; nothing if it is empty."""
    has_data = True
    while has_data:
        has_data = False
        for batch in local.open(epoch, 0, None):
            has_data = True
            yield batch


def _seek(
    local: UnevenStream, cursor: Cursor, ctx: DistContext
) -> tuple[Iterator[tuple[int, Any, Any]], int]:
    """This rank's batches from where all ranks together have seen this many rows.

    Returns:
        The batches, and how many padding batches preceded them.
    """
    epoch, wanted = cursor.position.epoch, cursor.position.index
    if cursor.state is not None:
        stream, behind = cursor.state["stream"], cursor.state["behind"]
        return iter(()) if stream is None else local.open(epoch, 0, stream), behind
    opened = local.open(epoch, 0, None) if local.sizes is None or wanted == 0 else None
    if wanted == 0:
        assert opened is not None
        return opened, 0
    source = local.sizes(epoch) if local.sizes else ((rows, rows) for rows, *_ in opened or ())
    units = seen = behind = 0
    most: list[Any] = ops.gather_objects(local.most, ctx)
    while seen < wanted:
        # As many steps as cannot overshoot, so that one exchange covers many.
        known = [steps for steps in most if steps is not None]
        least = max(1, (wanted - seen) // sum(known)) if len(known) == len(most) else 1
        with fail_together(ctx):
            mine = list(itertools.islice(source, least))
        units += sum(counts[1] for counts in mine)
        behind += least - len(mine)
        passed = sum(ops.gather_objects(sum(counts[0] for counts in mine), ctx))
        seen += passed
        if passed == 0:
            break
    if seen != wanted:
        raise DataError(
            f"The position has index {wanted}, which is not a boundary between two global batches "
            f'of these loaders. Data(source="sharded") can only resume with the world size, batch '
            f"size and data with which the position was made.",
            code="FX401",
        )
    return (local.open(epoch, units, None) if opened is None else opened), behind


def _gather_sizes(turn: _RankBatch, ctx: DistContext) -> list[tuple[int, int]]:
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
