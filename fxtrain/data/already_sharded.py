"""Loaders that yield only this rank's rows, each to its own rank."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import attrs
import torch
from torch.utils.data import DataLoader, IterableDataset

from fxtrain import _tree, ops
from fxtrain.data.dataset_uses import DatasetUses
from fxtrain.data.fetch import StreamMemory, start_worker
from fxtrain.data.order import hash_key
from fxtrain.data.order_texts import STREAM_ROWS, chained, text_of_ranks
from fxtrain.data.rank_slices import Batching, Cursor, GlobalBatch, Step, advance
from fxtrain.data.sources import StepSource, check_order, row_source, why_reread
from fxtrain.data.user_loader import read_loader, rebuild
from fxtrain.errors import DataError
from fxtrain.ops.plan_agreement import agree_on_plan
from fxtrain.state import DistContext, Plan, Position

_HAS, _ENDED, _FAILED = range(3)  # states of a rank

# One batch of a rank: its rows, its data, the state from which reading continues after it, which is
# None for a stream that keeps none, and the text of the rank's order; empty if it is unknown.
_Loaded = tuple[int, Any, Any, str]
# (epoch, state, or None for its start) → every batch that follows
_Open = Callable[[int, Any], Iterator[_Loaded]]


class _Turn(NamedTuple):
    """What one rank contributes to a global batch."""

    state: int
    size: int = 0
    data: Any = None
    stream: Any = None
    text: str = "ended"  # of the rank's order so far
    error: Exception | None = None


def presharded_source(
    loader: DataLoader[Any], ctx: DistContext, plan: Plan, uses: DatasetUses
) -> tuple[StepSource, Batching]:
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
        read, rows = _stream(loader, batching, ctx, plan, uses), None
    else:
        read, rows = _rows(loader, sampler, batching, ctx, plan, uses)
    source = StepSource(
        run=lambda cursor: uneven_batches(read, cursor, ctx, plan),
        length=lambda _: None,
        # Only the author of a stream knows whether it shuffles.
        shuffled=lambda: rows is not None and rows.shuffled(),
        stateful=rows is not None or not loader.num_workers,
        endless=rows is not None and rows.endless,
        reread_reason=why_reread(loader.dataset),
    )
    return source, batching


def _rows(
    loader: DataLoader[Any],
    sampler: Any,
    batching: Batching,
    ctx: DistContext,
    plan: Plan,
    uses: DatasetUses,
) -> tuple[_Open, StepSource]:
    """A map-style dataset that holds only this rank's rows; their order differs between ranks."""
    own = attrs.evolve(plan, even="pad", seed=hash_key(plan.seed, "rank", ctx.rank))
    source = row_source(loader, sampler, batching, own, (0,), uses)

    def read(epoch: int, state: Any) -> Iterator[_Loaded]:
        start = Cursor(Position(epoch=epoch))
        if state is not None:
            start = Cursor(Position(**state["position"]), state["order"])
        for (batch, after), (data,) in source.run(start):
            yield (
                batch.rows[0],
                data,
                {"position": attrs.asdict(after.position), "order": after.state},
                after.position.order,
            )

    return read, source


def _stream(
    loader: DataLoader[Any],
    batching: Batching,
    ctx: DistContext,
    plan: Plan,
    uses: DatasetUses,
) -> _Open:
    """An iterable dataset that yields only this rank's (and, in workers, this worker's) rows."""
    dataset = _Dataset(StreamMemory(loader.dataset, uses))
    items = batching.unit == "item"
    changes: dict[str, Any] = {
        "collate_fn": functools.partial(
            _counted,
            loader.collate_fn,
            dataset,
            # A worker's state would have to reach the worker that continues its rows.
            keeps=not loader.num_workers,
            items=items,
        )
    }
    if loader.num_workers:
        dataset.epoch.share_memory_()
        changes["worker_init_fn"] = functools.partial(start_worker, loader.worker_init_fn)
    size = None if items else batching.per_rank
    drops = not items and batching.even == "drop"
    over = rebuild(loader, dataset, batch_size=size, drop_last=drops, **changes)

    def read(epoch: int, state: Any) -> Iterator[_Loaded]:
        dataset.epoch.fill_(epoch)
        dataset.memory.set_epoch(epoch)  # before workers, which may share the number
        dataset.state = state
        assert isinstance(over.generator, torch.Generator)
        over.generator.manual_seed(hash_key(plan.seed, epoch, "workers", ctx.rank))
        yield from over

    return read


class _Dataset(IterableDataset[Any]):
    """The user's dataset, with `set_epoch` called also in persistent workers."""

    def __init__(self, memory: StreamMemory) -> None:
        self.memory, self.state, self.text = memory, None, ""
        self.epoch = torch.zeros(1, dtype=torch.int64, device="cpu")

    @property
    def dataset(self) -> Any:
        """The user's."""
        return self.memory.dataset

    def __iter__(self) -> Iterator[Any]:
        state, text = self.state, ""
        for place, row in enumerate(self.memory.open(int(self.epoch), state)):
            if state is None and place < STREAM_ROWS:
                text = chained(text, row)
            self.text = text  # of the pass that read last
            yield row


def _counted(
    collate: Callable[[Any], Any], dataset: _Dataset, rows: Any, *, keeps: bool, items: bool
) -> _Loaded:
    """The number of rows, what the user's collate function makes of them, and the state there."""
    batch = collate(rows)
    count = _tree.row_count(batch) or 1 if items else len(rows)
    return count, batch, dataset.memory.state() if keeps else None, dataset.text


def uneven_batches(
    read: _Open, cursor: Cursor, ctx: DistContext, plan: Plan
) -> Iterator[tuple[Step, tuple[Any]]]:
    """Global batches made of one batch of every rank.

    Under `pad`, a rank whose data has ended repeats its last batch until all have ended. Under
    `uneven` likewise, but these batches have size 0 and count for nothing. Under `drop`, the first
    rank that ends stops all. Without a state, what precedes the cursor is read again.

    Effects:
        Compares the plans; then one gather per global batch, one batch ahead, and two after some
        ranks have ended.

    Raises:
        DataError: a rank has no data, or the cursor does not match; on every rank.
        PlanError: the ranks pass different plans; on every rank.
        Exception: whatever a rank's loader raised; on other ranks a CollectiveError that names it.
    """
    agree_on_plan("iterating", ctx, plan)
    epoch, position = cursor.position.epoch, cursor.position
    # The state of this rank's stream, and rows of all ranks to skip.
    stream, skipped = (cursor.state["stream"], 0) if cursor.state else (None, position.index)
    # The data of this rank had ended at the checkpoint, while those of others had not.
    over = cursor.state is not None and stream is None
    # A pass opens a dataset once: a stream that counts its epochs would lose rows.
    padding = _last(_turns(read(epoch, None))) if over else _Turn(_ENDED)
    own = _turns(iter(()) if over else read(epoch, stream))
    ends = any if plan.even == "drop" else all
    now = next(own)
    table = _gather_sizes(now, ctx)
    while not ends(state != _HAS for state, *_ in table):
        ended = now.state != _HAS
        if any(state != _HAS for state, *_ in table):
            now = padding if ended and now.state != _FAILED else now
            table = _gather_sizes(now, ctx)
            _refuse_empty(table, ctx)
        # One batch ahead: whether this one is the last depends on what every rank has next.
        after = next(own)
        if ended or after.state != _HAS:  # a loop may change the data that it gets
            padding = _Turn(_ENDED, now.size, _tree.map_leaves(_copied, now.data))
        coming = _gather_sizes(after, ctx)
        rows = tuple(size if state == _HAS else 0 for state, size, _ in table)
        order = text_of_ranks([number for *_, number in table])
        if skipped:
            skipped -= sum(rows)
            if skipped < 0:
                break
            position = position if skipped else check_order(position, order)
        else:
            sizes = rows if plan.even == "uneven" else tuple(size for _, size, _ in table)
            batch = GlobalBatch(position.index, sum(rows), rows, sizes, ())
            over = ends(state != _HAS for state, *_ in coming)
            position = advance(position, batch, plan, is_last=over, order=order)
            state = None
            if ended or now.stream is not None:
                # At its end, a stream may have the state of its start again.
                stream = None if ended or after.state != _HAS else now.stream
                state = {"stream": stream}
            yield (batch, Cursor(position, state)), (now.data,)
        now, table = after, coming
    if skipped:
        raise DataError(
            f"The position has index {position.index}, which is not a boundary between two global "
            f'batches of these loaders. Data(source="sharded") can only resume with the world '
            f"size, batch size and data with which the position was made.",
            code="FX401",
        )


def _turns(batches: Iterator[_Loaded]) -> Iterator[_Turn]:
    """One turn per batch, then empty ones forever; a failure is a turn too."""
    try:
        for size, data, stream, text in batches:
            yield _Turn(_HAS, size, data, stream, text)
    except Exception as error:
        # Not raised here: the other ranks are about to gather, and would wait for this one.
        yield _Turn(_FAILED, error=error)
    while True:
        yield _Turn(_ENDED)


def _last(turns: Iterator[_Turn]) -> _Turn:
    """The last batch of a rank's epoch, as padding; or its failure."""
    last = _Turn(_ENDED)
    for turn in turns:
        if turn.state != _HAS:
            return turn if turn.state == _FAILED else last
        last = _Turn(_ENDED, turn.size, turn.data)
    return last


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _gather_sizes(turn: _Turn, ctx: DistContext) -> list[tuple[int, int, int]]:
    """Every rank's (state, size, number of its order, which is 0 if it is unknown).

    Raises:
        Exception: whatever a rank's loader raised; on other ranks a CollectiveError that names it.
    """
    # A number in place of the text, so that the gather is of one size on all ranks.
    number = hash_key(turn.text) if turn.text else 0
    local = torch.tensor([[turn.state, turn.size, number]], device="cpu")
    table: list[list[int]] = ops.gather(local, ctx).tolist()
    if any(state == _FAILED for state, *_ in table):
        with ops.fail_together(ctx):
            if turn.error is not None:
                raise turn.error
    return [(state, size, number) for state, size, number in table]


def _refuse_empty(table: list[tuple[int, int, int]], ctx: DistContext) -> None:
    empty = [rank for rank, (state, size, _) in enumerate(table) if state != _HAS and not size]
    if empty:
        raise DataError(
            f'Data(source="sharded"): the loaders of ranks {empty} of {ctx.world_size} yield '
            f"no rows, so there is nothing to pad with. Give every rank rows, or "
            f'use even="drop".'
        )
