"""Which rows each rank gets in each step: arithmetic, with no data in sight."""

from collections.abc import Iterator
from typing import Any

import attrs

from fxtrain._errors import DataError
from fxtrain.data._order import Units
from fxtrain.state import Plan, Position

__all__ = [
    "Layout",
    "Mark",
    "advance",
    "closes",
    "index_lists",
    "last_mark",
    "marks",
    "next_epoch",
    "steps_left",
]


@attrs.frozen(kw_only=True)
class Layout:
    """How steps are cut from the units of an epoch.

    Attributes:
        per_rank: Rows of one rank in one step; 1 where units are batches.
        ranks: Ranks that share the data.
        even: pad, drop or uneven.
        batched: Units are batches.
        share: Units are batches of which every rank takes an equal part.
    """

    per_rank: int
    ranks: int
    even: str
    batched: bool = False
    share: bool = False

    @property
    def stride(self) -> int:
        """Units that all ranks together consume in a full step."""
        return 1 if self.share else self.per_rank * self.ranks


@attrs.frozen
class Mark:
    """One step, seen from above: the same on every rank.

    Attributes:
        rows: Real rows of each rank.
        sizes: Rows of each rank with padding.
        units: Units consumed.
        is_last: It is the last step of the epoch.
        window_rows: See `Batch`.
    """

    rows: tuple[int, ...]
    sizes: tuple[int, ...]
    units: int
    is_last: bool
    window_rows: int | None = None


def steps_left(layout: Layout, length: int, start: int) -> int:
    """Steps from a cursor to the end of an epoch of so many units."""
    left = max(0, length - start)
    whole, rest = divmod(left, layout.stride)
    return whole + (rest > 0 and layout.even != "drop")


def last_mark(layout: Layout, units: Units, start: int) -> Mark | None:
    """The last step of an epoch, without those before it."""
    steps = steps_left(layout, units.length, start)
    if not steps:
        return None
    return _mark(layout, units, start + (steps - 1) * layout.stride, is_last=True)


def closes(plan: Plan, micro: int, *, is_last: bool) -> bool:
    """Whether the micro-batch number `micro` of a window, from 1, is its last."""
    return micro >= plan.accumulate or (is_last and plan.flush)


def advance(position: Position, mark: Mark, plan: Plan) -> Position:
    """The cursor just after a step."""
    micro = position.micro + 1
    done = closes(plan, micro, is_last=mark.is_last)
    return Position(
        epoch=position.epoch,
        index=position.index + mark.units,
        samples=position.samples + sum(mark.rows),
        updates=position.updates + done,
        micro=0 if done else micro,
        is_last=mark.is_last,
    )


def next_epoch(position: Position) -> Position:
    """The cursor at the start of the epoch that follows."""
    return attrs.evolve(position, epoch=position.epoch + 1, index=0, is_last=False)


def marks(layout: Layout, units: Units, position: Position, plan: Plan) -> Iterator[Mark]:
    """Every step from a cursor to the end of its epoch."""
    steps = steps_left(layout, units.length, position.index)
    first = _window_start(layout, position, plan)
    total, ends = first, -1
    for step in range(steps):
        mark = _mark(
            layout, units, position.index + step * layout.stride, is_last=step == steps - 1
        )
        if plan.accumulate == 1:
            yield attrs.evolve(mark, window_rows=sum(mark.sizes))
            continue
        if step > ends:
            ends = step + plan.accumulate - 1 - (position.micro if ends < 0 else 0)
            total = _window_rows(layout, units, position.index, step, ends, steps, plan)
            total = None if first is None or total is None else total + first
            first = 0
        yield attrs.evolve(mark, window_rows=total)


def _window_start(layout: Layout, position: Position, plan: Plan) -> int | None:
    """Rows already in the window that is open at a cursor; None if it cannot be known."""
    if position.micro == 0:
        return 0
    if layout.batched or position.index < position.micro * layout.stride:
        return None
    return position.micro * layout.stride


def _window_rows(
    layout: Layout, units: Units, start: int, step: int, ends: int, steps: int, plan: Plan
) -> int | None:
    if ends >= steps and not plan.flush:
        return None  # goes on in the next epoch
    last = min(ends, steps - 1)
    if not layout.batched:
        end = _mark(layout, units, start + last * layout.stride, is_last=last == steps - 1)
        return (last - step) * layout.stride + sum(end.sizes)
    return sum(
        sum(_mark(layout, units, start + i * layout.stride, is_last=i == steps - 1).sizes)
        for i in range(step, last + 1)
    )


def _mark(layout: Layout, units: Units, base: int, *, is_last: bool) -> Mark:
    if layout.batched:
        return _batch_mark(layout, units, base, is_last=is_last)
    size, left = layout.per_rank, units.length - base
    if left >= layout.stride:
        full = (size,) * layout.ranks
        return Mark(full, full, layout.stride, is_last)
    rows = tuple(min(size, max(0, left - rank * size)) for rank in range(layout.ranks))
    padded = layout.even == "pad" and layout.ranks > 1
    return Mark(rows, (size,) * layout.ranks if padded else rows, left, is_last)


def _batch_mark(layout: Layout, units: Units, base: int, *, is_last: bool) -> Mark:
    if layout.share:
        (batch,) = units.read(base, base + 1)
        part, rest = divmod(len(batch), layout.ranks)
        if rest:
            raise DataError(
                f'batch="global": batch {base} of the batch sampler has {len(batch)} rows, which '
                f"do not divide over {layout.ranks} ranks. Make batches a multiple of "
                f'{layout.ranks}, or use batch="per_rank".'
            )
        even = (part,) * layout.ranks
        return Mark(even, even, 1, is_last)
    real = list(units.read(base, min(base + layout.ranks, units.length)))
    missing = layout.ranks - len(real)
    rows = tuple([len(batch) for batch in real] + [0] * missing)
    if not missing or layout.even != "pad":
        return Mark(rows, rows, len(real), is_last)
    sizes = rows[: len(real)] + tuple(len(batch) for batch in units.stream(0, missing))
    return Mark(rows, sizes, len(real), is_last)


def index_lists(
    layout: Layout, units: Units, start: int, ranks: tuple[int, ...]
) -> Iterator[tuple[int, list[Any]]]:
    """Dataset indices for these ranks, step by step, each with the step's first unit."""
    steps = steps_left(layout, units.length, start)
    for step in range(steps):
        base = start + step * layout.stride
        for rank in ranks:
            indices = _indices(layout, units, base, rank)
            if indices:
                yield base, indices


def _indices(layout: Layout, units: Units, base: int, rank: int) -> list[Any]:
    if layout.share:
        (batch,) = units.read(base, base + 1)
        part = len(batch) // layout.ranks
        return list(batch[rank * part : (rank + 1) * part])
    low = base + rank * layout.per_rank
    high = min(low + layout.per_rank, units.length)
    found = list(units.read(low, high)) if low < high else []
    if layout.even == "pad" and layout.ranks > 1 and len(found) < layout.per_rank:
        # Padding goes on from the start of the epoch, counted over all ranks.
        before = max(0, low - units.length)
        found += units.stream(before, before + layout.per_rank - len(found))
    return list(found[0]) if layout.batched and found else found
