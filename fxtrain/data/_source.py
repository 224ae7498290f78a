"""Where a rank's batches come from: its own rows, rank 0, or a loader that is split already.

A source is a function from a cursor to cuts, this rank's part of each step with the step's
mark. `shard` chooses it once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
from torch.utils.data import DataLoader

from fxtrain import _tree, ops
from fxtrain._errors import DataError
from fxtrain.data._feed import Feed, rebuild, reseeding
from fxtrain.data._order import Order
from fxtrain.data._slices import Layout, Mark, index_lists, last_mark, marks, steps_left
from fxtrain.data._stream import Cut, Stream, keep
from fxtrain.state import DistContext, Plan, Position

__all__ = ["Source", "dispatched", "map_source", "presharded", "stream_source"]

Cuts = Callable[[Position], Iterator[Cut]]


@attrs.frozen(eq=False)
class Source:
    """Cuts from a cursor on, and what is known of an epoch before it runs.

    Attributes:
        cuts: Cursor → this rank's part of every step until the epoch ends.
        marks: Cursor → every step until the epoch ends; None where only reading tells.
        outline: Cursor → units of the epoch, steps from there on, and the last of them.
        shuffled: Epochs differ in their order.
    """

    cuts: Cuts
    shuffled: bool
    marks: Callable[[Position], Iterator[Mark]] | None = None
    outline: Callable[[Position], tuple[int, int, Mark | None]] | None = None


def map_source(
    loader: DataLoader[Any], order: Order, layout: Layout, plan: Plan, ranks: tuple[int, ...]
) -> Source:
    """Rows of a map-style dataset, by index. With several ranks, each step's cuts in order."""
    feed = Feed()
    collates = loader.batch_sampler is not None
    reseeds = loader.num_workers > 0 and plan.data.reseed_workers
    dataset, tag = (
        reseeding(loader.dataset, batched=collates) if reseeds else (loader.dataset, None)
    )
    how: dict[str, Any] = {"batch_sampler": feed} if collates else {"sampler": feed}
    if not collates:
        how["batch_size"] = None
    rebuilt = rebuild(loader, dataset, **how)

    def indices(position: Position) -> Iterator[Any]:
        units = order.epoch(position.epoch)
        for base, found in index_lists(layout, units, position.index, ranks):
            index: Any = found if collates else found[0]
            yield index if tag is None else tag(index, plan.seed, position.epoch, base, ranks[0])

    def all_marks(position: Position) -> Iterator[Mark]:
        return marks(layout, order.epoch(position.epoch), position, plan)

    def cuts(position: Position) -> Iterator[Cut]:
        feed.next = lambda: indices(position)
        _seed_loader(rebuilt, plan, position)
        batches = iter(rebuilt)
        steps = list_ahead(all_marks(position))
        for mark, following in steps:
            for rank in ranks:
                data = next(batches) if mark.sizes[rank] else None
                yield Cut(data, mark, following)
        next(batches, None)  # lets the loader end its workers in order

    def outline(position: Position) -> tuple[int, int, Mark | None]:
        units = order.epoch(position.epoch)
        steps = steps_left(layout, units.length, position.index)
        return units.length, steps, last_mark(layout, units, position.index)

    return Source(cuts, order.shuffled, all_marks, outline)


def stream_source(
    loader: DataLoader[Any], layout: Layout, plan: Plan, ranks: tuple[int, ...]
) -> Source:
    """Rows of an iterable dataset, in its own order."""
    single = loader.batch_size is None
    collate = loader.collate_fn

    def cuts(position: Position) -> Iterator[Cut]:
        stream = Stream(loader.dataset, (_First(collate) if single else collate), layout, ranks)
        stream.epoch, stream.start = position.epoch, position.index
        # Workers hold a copy of the dataset, so each epoch starts new ones.
        rebuilt = rebuild(
            loader, stream, batch_size=None, collate_fn=keep, persistent_workers=False
        )
        _seed_loader(rebuilt, plan, position)
        yield from rebuilt

    return Source(cuts, shuffled=False)


def dispatched(inner: Source, ctx: DistContext) -> Source:
    """Steps that rank 0 reads and of which it sends each rank its part."""

    def read(position: Position) -> Iterator[list[Cut] | None]:
        cuts = inner.cuts(position)
        while step := [cut for _, cut in zip(range(ctx.world_size), cuts, strict=False)]:
            yield step
            if step[0].mark.is_last:
                return

    def cuts(position: Position) -> Iterator[Cut]:
        steps = read(position) if ctx.is_main else iter(())
        while True:
            letters, problem = _next_letters(steps, ctx)
            letter = ops.scatter(letters, ctx)
            if problem is not None:
                raise problem
            if isinstance(letter, str):
                raise DataError(f"Rank 0 failed while it read the data: {letter}")
            if letter is None:
                return
            data, mark, following = letter["data"], letter["mark"].value, letter["following"].value
            yield Cut(data, mark, following)
            if mark.is_last:
                return

    return Source(cuts, inner.shuffled)


def presharded(loader: DataLoader[Any], ctx: DistContext, plan: Plan) -> Source:
    """Batches of a loader that yields only this rank's rows; ranks agree when data ends."""

    def cuts(position: Position) -> Iterator[Cut]:
        batches = iter(loader)
        for _ in range(position.index):
            next(batches, None)
        current = next(batches, None)
        filler = current
        found = ops.gather_objects(_count(current), ctx)
        if any(rows is None for rows in found):
            empty = [rank for rank, rows in enumerate(found) if rows is None]
            if len(empty) == ctx.world_size:
                return
            raise DataError(f'Data(source="sharded"): the loaders of ranks {empty} are empty.')
        while True:
            after = next(batches, None)
            coming = ops.gather_objects(_count(after), ctx)
            ended = [rows is None for rows in coming]
            last = any(ended) if plan.even == "drop" else all(ended)
            rows = tuple(count or 0 for count in found)
            sizes = tuple(ops.gather_objects(_count(filler if current is None else current), ctx))
            mark = Mark(rows, sizes if 0 in rows else rows, 1, last)
            yield Cut(filler if current is None else current, mark)
            if last:
                return
            current, found = after, coming

    return Source(cuts, shuffled=False)


def list_ahead(steps: Iterator[Mark]) -> Iterator[tuple[Mark, Mark | None]]:
    """Each step with the one after it, where some rank has no row in that one."""
    mark = next(steps, None)
    while mark is not None:
        after = next(steps, None)
        yield mark, after if after is not None and 0 in after.sizes else None
        mark = after


class _Sealed:
    """A value that travels as one leaf."""

    def __init__(self, value: Any) -> None:
        self.value = value


class _First:
    """Collates the single item of a loader without batches; picklable for workers."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def __call__(self, rows: list[Any]) -> Any:
        return self.convert(rows[0])


def _next_letters(
    steps: Iterator[list[Cut] | None], ctx: DistContext
) -> tuple[list[Any] | None, BaseException | None]:
    """What rank 0 sends to each rank next: a cut, None at the end, or what went wrong."""
    if not ctx.is_main:
        return None, None
    try:
        step = next(steps, None)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"] * ctx.world_size, error
    if step is None:
        return [None] * ctx.world_size, None
    return [
        {"data": cut.data, "mark": _Sealed(cut.mark), "following": _Sealed(cut.following)}
        for cut in step
    ], None


def _count(data: Any) -> int | None:
    return None if data is None else (_tree.rows_of(data) or 1)


def _seed_loader(loader: DataLoader[Any], plan: Plan, position: Position) -> None:
    if loader.generator is not None:
        loader.generator.manual_seed((plan.seed * 1_000_003 + position.epoch) & ((1 << 62) - 1))
