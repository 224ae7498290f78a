"""Cursors and accumulation windows of global batches."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import attrs

from fxtrain.data.rank_slices import Batching, GlobalBatch
from fxtrain.state import Plan, Position

_BLOCK = 32  # steps made at a time


class PositionedBatch(NamedTuple):
    """One global batch and its position in the run; equal on every rank except for the keys.

    Attributes:
        batch: The global batch.
        position: The cursor just after it.
        window_rows: Rows, including padding, in its whole accumulation window, where known.
        state: Of the data just after its rows; None where there is none. May differ by rank.
    """

    batch: GlobalBatch
    position: Position
    window_rows: int | None
    state: Any = None


class Cursor(NamedTuple):
    """A position, and what the window that is open there contains.

    Attributes:
        position: How far the run is.
        held: Rows, including padding, in the micro-batches of the open window, where known.
        state: Of the stream or blend there, from which it continues.
    """

    position: Position
    held: int | None = 0
    state: Any = None


def advance(position: Position, batch: GlobalBatch, plan: Plan, *, is_last: bool) -> Position:
    """The position just after a global batch."""
    micro = position.micro + 1
    closes = micro >= plan.accumulate or (is_last and plan.flush)
    return Position(
        epoch=position.epoch,
        index=position.index + batch.units,
        samples=position.samples + sum(batch.rows),
        updates=position.updates + closes,
        micro=0 if closes else micro,
        is_last=is_last,
    )


def to_epoch(cursor: Cursor, epoch: int) -> Cursor:
    """The cursor at the start of a later epoch, with a window still open."""
    position = attrs.evolve(cursor.position, epoch=epoch, index=0, is_last=False)
    return Cursor(position, cursor.held)


def assign_windows(
    batches: Iterable[GlobalBatch],
    cursor: Cursor,
    plan: Plan,
    later: Callable[[], Iterator[int]] | None = None,
) -> Iterator[PositionedBatch]:
    """Assign global batches to accumulation windows, reading one window ahead.

    Args:
        batches: From the cursor to the end of its epoch.
        later: Rows, including padding, of each global batch of the following epochs, if known.
    """
    position, held = cursor.position, cursor.held
    window: list[GlobalBatch] = []
    ahead = iter(batches)
    following = next(ahead, None)
    while following is not None:
        batch, following = following, next(ahead, None)
        is_last = following is None
        if plan.accumulate == 1 and held == 0:  # every window is one batch
            position = advance(position, batch, plan, is_last=is_last)
            yield PositionedBatch(batch, position, sum(batch.sizes), batch.state)
            continue
        window.append(batch)
        open_for = plan.accumulate - position.micro - len(window)
        if open_for > 0 and not is_last:
            continue
        rows = None if held is None else held + sum([sum(batch.sizes) for batch in window])
        if open_for > 0 and not plan.flush:
            rows = _with_later_rows(rows, later, open_for)
        ends = len(window) - 1
        for number, inside in enumerate(window):
            position = advance(position, inside, plan, is_last=is_last and number == ends)
            yield PositionedBatch(inside, position, rows, inside.state)
        window.clear()
        held = 0


def in_blocks(steps: Iterator[PositionedBatch], *, ahead: bool) -> Iterator[list[PositionedBatch]]:
    """The same steps, made several at a time if they may be made ahead of their use.

    Between batches, the data and the training step displace this code from the caches, which makes
    it several times slower.
    """
    size = _BLOCK if ahead else 1
    return iter(lambda: list(itertools.islice(steps, size)), [])


def totals(batching: Batching, length: int) -> Iterator[int]:
    """Rows, including padding, of every global batch of one epoch with this many rows."""
    whole, rest = divmod(length, batching.stride)
    yield from itertools.repeat(batching.stride, whole)
    if rest and batching.even != "drop":
        yield batching.stride if batching.pads else rest


def _with_later_rows(
    rows: int | None, later: Callable[[], Iterator[int]] | None, missing: int
) -> int | None:
    """Add the batches of following epochs to a window that the end of the data leaves open."""
    if rows is None or later is None:
        return None
    found = list(itertools.islice(later(), missing))
    return rows + sum(found) if len(found) == missing else None
