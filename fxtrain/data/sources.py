"""Where global batches come from: a source turns a cursor into steps with their data."""

import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fxtrain import _tree, ops
from fxtrain.data.dataset_uses import DatasetUse, DatasetUses
from fxtrain.data.fetch import (
    RowFetch,
    StreamBatch,
    StreamFetch,
    StreamMemory,
    StreamRequest,
    collate_nothing,
    fetch_key,
    has_shuffle_buffer,
    owner_of,
    start_worker,
)
from fxtrain.data.order import (
    CustomOrder,
    EpochOrder,
    find_order,
    hash_key,
    sampler_length,
    set_epoch_of,
)
from fxtrain.data.order_texts import text_of_dataset, text_of_units
from fxtrain.data.rank_slices import (
    Batching,
    Cursor,
    GlobalBatch,
    StatefulOrder,
    Step,
    advance,
    batches_of_order,
    batches_of_stream,
)
from fxtrain.data.to_device import with_tensors
from fxtrain.data.user_loader import FedSampler, rebuild
from fxtrain.errors import DataError
from fxtrain.ops.plan_agreement import agree_on_plan
from fxtrain.ops.transport.pickled import error_text
from fxtrain.state import DistContext, Plan, Position

# How torch's messages begin for an error inside a worker, and for a worker that ended.
_CAUGHT = "Caught "
_ENDED = "DataLoader worker"

# A step, and the data of each served rank.
Loaded = tuple[Step, Sequence[Any]]
_Order = EpochOrder | CustomOrder | StatefulOrder


@attrs.frozen(kw_only=True, eq=False)
class StepSource:
    """Steps from a cursor on, and what is known of an epoch before reading it."""

    run: Callable[[Cursor], Iterator[Loaded]]  # cursor → every step until the epoch ends
    length: Callable[[int], int | None]  # units in an epoch; None if only reading shows
    shuffled: Callable[[], bool]  # whether epochs differ in their order, as far as is known so far
    # Whether worker processes read, so that prefetching draws no random numbers here.
    apart: bool = False
    stateful: bool = False  # whether steps may have a state to continue from
    endless: bool = False  # whether an epoch has no end
    reread_reason: str = (
        ""  # why a stream with a state is read again from its start; empty if it is not
    )


def row_source(
    loader: DataLoader[Any],
    sampler: Any,
    batching: Batching,
    plan: Plan,
    ranks: Sequence[int],
    uses: DatasetUses,
) -> StepSource:
    """A map-style dataset, read by index for some of the ranks."""
    use = uses.of(loader.dataset)
    order: _Order | None = None  # that of the latest epoch
    reseeds = plan.data.reseed_workers and loader.num_workers > 0
    asks = loader.num_workers > 0 or len(ranks) != 1
    idle = [_over_rows(loader, use, asks=asks)]  # which no iteration reads
    known = _KnownEpoch(loader.dataset, use, sampler, plan.seed)

    def ask(batch: GlobalBatch, epoch: int) -> Any:
        seeds = [fetch_key(batching, plan.seed, epoch, batch.first, rank) for rank in ranks]
        return epoch, batch.keys, tuple(seeds) if reseeds else ()

    def run(cursor: Cursor) -> Iterator[Loaded]:
        nonlocal order
        epoch, steps = cursor.position.epoch, deque[Step]()
        # Here first: workers that share the number with this process would all add to it.
        known.set_epoch(epoch)
        order, batches = _order_from(cursor, sampler, batching, plan, ranks)
        text = "" if isinstance(order, StatefulOrder) else _order_text(order, batching, loader)
        start = check_order(cursor.position, text)

        def indices() -> Iterator[Any]:
            position, following = start, next(batches, None)
            while following is not None:
                batch, following = following, next(batches, None)
                position = advance(position, batch, plan, is_last=following is None)
                steps.append((batch, Cursor(position, batch.state)))
                if use.epoch is not None and use.epoch != epoch:  # an evaluation set another
                    known.set_epoch(epoch)
                yield ask(batch, epoch) if asks else batch.keys[0]

        feed, over = idle.pop() if idle else _over_rows(loader, use, asks=asks)
        feed.give(indices())
        _seed_workers(over, plan, epoch, ranks)
        try:
            with _named_errors(loader):
                for data in over:
                    yield steps.popleft(), data if asks else (data,)
            if steps:
                raise _stopped(loader)
        finally:
            idle.append((feed, over))

    return StepSource(
        run=run,
        length=lambda epoch: known.length(epoch, idle=bool(idle)),
        shuffled=lambda: order is not None and order.shuffled,
        apart=loader.num_workers > 0,
        stateful=isinstance(sampler, StatefulOrder),
        endless=isinstance(sampler, StatefulOrder) and sampler.endless,
    )


@attrs.define(eq=False)
class _KnownEpoch:
    """A dataset and its sampler, whose number of rows may depend on the epoch."""

    dataset: Any
    use: DatasetUse
    sampler: Any
    seed: int
    epoch: int | None = None  # the one that they know

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset; the order sets that of the sampler."""
        self.epoch = epoch
        self.use.set_epoch(self.dataset, epoch)

    def length(self, epoch: int, *, idle: bool) -> int | None:
        """Units in an epoch; or in the one that an iteration reads, unless they are idle."""
        if idle and self.epoch != epoch:
            self.set_epoch(epoch)
            set_epoch_of(self.sampler, self.seed, epoch)
        return sampler_length(self.sampler)


def _order_from(
    cursor: Cursor, sampler: Any, batching: Batching, plan: Plan, ranks: Sequence[int]
) -> tuple[_Order, Iterator[GlobalBatch]]:
    """The order of an epoch, and its global batches from a cursor on."""
    epoch, start = cursor.position.epoch, cursor.position.index
    if isinstance(sampler, StatefulOrder):
        seed, accumulate = plan.seed, plan.accumulate
        return sampler, sampler.batches(batching, cursor, ranks, seed=seed, accumulate=accumulate)
    if (known := find_order(sampler, plan.seed, epoch)) is not None:
        return known, batches_of_order(batching, known, start, ranks)
    order = CustomOrder(sampler, plan.seed, epoch)
    return order, batches_of_stream(batching, order, start, ranks)


def _order_text(
    order: EpochOrder | CustomOrder, batching: Batching, loader: DataLoader[Any]
) -> str:
    """What the order of an epoch depends on."""
    unit = "row" if batching.unit == "item" else batching.unit
    texts = text_of_units(unit, order.length, order.head()), text_of_dataset(loader.dataset)
    return " of ".join(filter(None, texts))


def check_order(position: Position, order: str) -> Position:
    """The position with the order of the epoch that is read from there.

    Raises:
        DataError: the position is inside the epoch of another order.
    """
    # At the start of an epoch, any order may begin.
    known = position.order if position.index and not position.is_last else ""
    if known and known != order:
        raise DataError(
            f"The position is inside epoch {position.epoch}, at index {position.index}, of data in "
            f"another order: {known} when it was made, {order or 'none'} now. Rows would be "
            f"repeated, and others never seen. Pass the data, sampler, seed and files that it was "
            f"made with; a stream that shuffles needs set_epoch or a state. Or begin an epoch: "
            f"loader.at(attrs.evolve(position, epoch={position.epoch + 1}, index=0)).",
            code="FX401",
        )
    return attrs.evolve(position, order=order)


def stream_source(
    loader: DataLoader[Any],
    batching: Batching,
    plan: Plan,
    ranks: Sequence[int],
    uses: DatasetUses,
) -> StepSource:
    """An iterable dataset, read in its own order for some of the ranks."""
    # By the number of a pass, a worker knows that it has to open the stream from the cursor.
    passes = itertools.count()
    reseeds = plan.data.reseed_workers and loader.num_workers > 0
    seed = plan.seed if plan.data.reseed_workers else None

    def open_loader() -> tuple[StreamFetch, FedSampler, DataLoader[Any]]:
        memory = StreamMemory(loader.dataset, uses)
        settings = memory, loader.collate_fn, batching, tuple(ranks), seed
        fetch = StreamFetch(*settings, reseeds=reseeds)
        return fetch, *_over_fetch(loader, fetch)

    idle = [open_loader()]  # which no iteration reads

    def length(epoch: int) -> int | None:
        if idle:
            idle[0][0].memory.set_epoch(epoch)
        return sampler_length(loader.dataset)

    def run(cursor: Cursor) -> Iterator[Loaded]:
        position = cursor.position
        # One that another iteration is reading cannot serve this one too.
        fetch, feed, over = idle.pop() if idle else open_loader()
        opened = next(passes), position.epoch, position.index, position.order
        # Each worker opens the stream at its first request.
        first, state, epoch = max(1, loader.num_workers), cursor.state, position.epoch

        def requests() -> Iterator[StreamRequest]:
            # As in `row_source`.
            fetch.memory.set_epoch(epoch)
            for step in itertools.count():
                yield StreamRequest(*opened, step, state if step < first else None)

        feed.give(requests())
        _seed_workers(over, plan, position.epoch, ranks)
        try:
            with _named_errors(loader):
                for read in over:
                    if read is None:
                        return
                    batch, is_last, data, state, began, order = StreamBatch(*read)
                    # Older torch turns tuples into lists when it pins memory.
                    batch = GlobalBatch(batch[0], batch[1], tuple(batch[2]), tuple(batch[3]), ())
                    _check_began(cursor, position, began)
                    position = advance(position, batch, plan, is_last=is_last, order=order)
                    yield (batch, Cursor(position, state)), data
                    if is_last:
                        return
            raise _stopped(loader)
        finally:
            fetch.close()
            idle.append((fetch, feed, over))

    return StepSource(
        run=run,
        length=length,
        shuffled=lambda: False,  # only the author of a stream knows whether it shuffles
        apart=loader.num_workers > 0,
        stateful=True,  # only reading shows whether an iterator keeps a state
        reread_reason=why_reread(loader.dataset),
    )


def why_reread(dataset: Any) -> str:
    """Why a stream with a state is read again from its start; empty if it is not."""
    if has_shuffle_buffer(owner_of(dataset)):
        return "its state leaves out the rows of its shuffle buffer"
    return ""


def _check_began(cursor: Cursor, position: Position, began: str) -> None:
    """Check that a stream that is read again yields the rows that it had before the cursor."""
    if cursor.state is None and position is cursor.position:
        check_order(position, began)


class _MissingRowError(DataError, IndexError):
    """A row that does not exist; still an IndexError, as the dataset raised."""


@contextmanager
def _named_errors(loader: DataLoader[Any]) -> Iterator[None]:
    """Name the errors of reading a loader in the block.

    Raises:
        DataError: a worker process ended, or the dataset has fewer rows than its length. Any
            other error of the dataset is raised unchanged.
    """
    try:
        yield
    except IndexError as error:
        if isinstance(loader.dataset, IterableDataset):
            raise
        dataset: Any = loader.dataset
        reason = str(error).strip().rpartition("\n")[2]
        raise _MissingRowError(
            f"iterating: {type(dataset).__name__} raised IndexError: {reason}. len(dataset) is "
            f"{len(dataset)}. If it has fewer rows, return their number from __len__; if a sampler "
            f"chose the row, make it choose from those."
        ) from error
    except (OSError, EOFError, RuntimeError) as error:
        if not loader.num_workers or not _worker_ended(error):
            raise
        raise DataError(
            f"iterating: a worker process of this DataLoader (num_workers={loader.num_workers}) "
            f"ended while reading. The system kills workers when memory runs out, and a crash in "
            f"native code ends them: use fewer workers or smaller batches, or num_workers=0 to see "
            f"the crash in this process.",
            code="FX402",
        ) from error


def _stopped(loader: DataLoader[Any]) -> DataError:
    return DataError(
        f"iterating: {type(loader.dataset).__name__} or the collate function raised StopIteration "
        f"within an epoch, which would end the epoch there. An iterator in it has ended: use "
        f"next(iterator, None), or start it again.",
        code="FX402",
    )


def _worker_ended(error: Exception) -> bool:
    """Whether torch lost a worker; an error that a dataset raised there reads differently."""
    text = str(error)
    if text.startswith(_CAUGHT):
        return False
    if isinstance(error, FileNotFoundError):  # a worker's socket has no name in this process
        return error.filename is None
    return isinstance(error, ConnectionError | EOFError) or text.startswith(_ENDED)


def _over_rows(
    loader: DataLoader[Any], use: DatasetUse, *, asks: bool
) -> tuple[FedSampler, DataLoader[Any]]:
    collates, feed = loader.batch_sampler is not None, FedSampler()
    if asks:
        fetch = RowFetch(loader.dataset, use, loader.collate_fn, collates=collates)
        return _over_fetch(loader, fetch)
    if collates:
        return feed, rebuild(loader, loader.dataset, batch_sampler=feed)
    return feed, rebuild(loader, loader.dataset, batch_size=None, sampler=feed)


def _over_fetch(loader: DataLoader[Any], fetch: Any) -> tuple[FedSampler, DataLoader[Any]]:
    feed = FedSampler()
    changes: dict[str, Any] = {"batch_size": None, "sampler": feed, "collate_fn": collate_nothing}
    if loader.num_workers:
        changes["worker_init_fn"] = functools.partial(start_worker, loader.worker_init_fn)
    return feed, rebuild(loader, fetch, **changes)


def _seed_workers(over: DataLoader[Any], plan: Plan, epoch: int, ranks: Sequence[int]) -> None:
    """The seed that torch gives its workers."""
    assert isinstance(over.generator, torch.Generator)
    over.generator.manual_seed(hash_key(plan.seed, epoch, "workers", *ranks[:1]))


def function_source(
    make: Callable[[Position], Any], batching: Batching, plan: Plan, ranks: Sequence[int]
) -> StepSource:
    """An epoch without an end, of which a function makes the rows for some of the ranks.

    The function is called when its batch is due, and not before.
    """
    size, stride = batching.per_rank, batching.stride
    sizes = (size,) * batching.ranks
    shared = plan.batch == "global"

    def rows_of(position: Position) -> list[Any]:
        if shared:
            rows = _called(make, position, stride)
            return [_part(rows, stride, rank * size, size) for rank in ranks]
        starts = [
            attrs.evolve(
                position,
                index=position.index + rank * size,
                samples=position.samples + rank * size,
            )
            for rank in ranks
        ]
        return [_called(make, start, size) for start in starts]

    def run(cursor: Cursor) -> Iterator[Loaded]:
        position = cursor.position
        while True:
            batch = GlobalBatch(position.index, stride, sizes, sizes, ())
            data = rows_of(position)
            position = advance(position, batch, plan, is_last=False)
            yield (batch, Cursor(position)), data

    return StepSource(run=run, length=lambda _: None, shuffled=lambda: False, endless=True)


def _called(make: Callable[[Position], Any], position: Position, size: int) -> Any:
    rows = with_tensors(make(position))
    count = _tree.row_count(rows)
    if count != size:
        has = f"{type(rows).__name__} without rows" if count is None else f"{count} rows"
        raise DataError(
            f"The function of this loader returned {has} for index {position.index}, and the "
            f"loader has batch_size={size}. Return {size} rows for every position."
        )
    return rows


def _part(rows: Any, count: int, start: int, size: int) -> Any:
    """A rank's rows of a global batch."""

    def cut(leaf: Any) -> Any:
        whole = not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != count
        return leaf if whole else leaf.narrow(0, start, size)

    return _tree.map_leaves(cut, rows)


def dispatch_source(
    make: Callable[[], tuple[StepSource, Batching]], ctx: DistContext, plan: Plan
) -> tuple[StepSource, Batching]:
    """Batches that rank 0 reads; the other ranks never touch the dataset.

    Args:
        make: Creates the source that serves all ranks; called on rank 0 only.

    Effects:
        A broadcast here, after the plans are compared, and one scatter per global batch.

    Raises:
        DataError: rank 0 could not create its source; rank 0 raises its own error.
        PlanError: the ranks pass different plans; on every rank.
    """
    agree_on_plan("shard", ctx, plan)
    inner, (batching, length, stateful, endless) = _broadcast_layout(make, ctx)

    def run(cursor: Cursor) -> Iterator[Loaded]:
        steps = iter(()) if inner is None else inner.run(cursor)
        while True:
            messages, problem, state = _messages(steps, ctx) if ctx.is_main else (None, None, None)
            message = ops.scatter(messages, ctx)
            if problem is not None:
                raise problem
            if "failed" in message:
                raise _failed(message["failed"])
            if "step" not in message:
                return
            batch, position = message["step"]
            yield (batch, Cursor(position, state)), (message["data"],)
            if position.is_last:
                return

    source = StepSource(
        run=run,
        length=lambda _: length,
        shuffled=(lambda: False) if inner is None else inner.shuffled,
        stateful=stateful,
        endless=endless,
    )
    return source, batching


def _broadcast_layout(
    make: Callable[[], tuple[StepSource, Batching]], ctx: DistContext
) -> tuple[StepSource | None, tuple[Batching, int | None, bool, bool]]:
    """Rank 0's source and, on every rank, its batching, length, `stateful` and `endless`."""
    source, problem, layout = None, None, None
    if ctx.is_main:
        try:
            source, batching = make()
            layout = batching, source.length(0), source.stateful, source.endless
        except Exception as error:
            problem, layout = error, error_text(error)
    layout: Any = ops.broadcast_object(layout, ctx)
    if problem is not None:
        raise problem
    if isinstance(layout, str):
        raise _failed(layout)
    return source, layout


def _messages(
    steps: Iterator[Loaded], ctx: DistContext
) -> tuple[list[dict[str, Any]], Exception | None, Any]:
    """What each rank receives next: a step with its data, None at the end, or an error text.

    Returns:
        That, the error, and the state of the stream, which stays here.
    """
    try:
        step = next(steps, None)
    except Exception as error:
        # As a message, since the other ranks wait in `scatter`.
        return [{"failed": error_text(error)}] * ctx.world_size, error, None
    if step is None:
        return [{}] * ctx.world_size, None, None
    (batch, cursor), data = step
    # Only the reading rank needs the indices.
    head = batch._replace(keys=(), state=None), cursor.position
    messages = [{"step": head, "data": data[rank]} for rank in range(ctx.world_size)]
    return messages, None, cursor.state


def _failed(words: str) -> DataError:
    return DataError(f"Rank 0 failed while reading the data for all ranks: {words}", code="FX402")
