"""Cursors and accumulation windows of global batches."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import attrs

from fxtrain.data.rank_slices import GlobalBatch
from fxtrain.state import Plan, Position

_BLOCK = 32  # steps made at a time


class Cursor(NamedTuple):
    """A position, and the state of what is read there.

    Attributes:
        position: How far the run is.
        state: Of the stream or blend there, from which it continues.
    """

    position: Position
    state: Any = None


# A global batch, and the cursor just after it.
Step = tuple[GlobalBatch, Cursor]


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


def to_epoch(position: Position, epoch: int) -> Position:
    """The position at the start of a later epoch, with a window still open."""
    return attrs.evolve(position, epoch=epoch, index=0, is_last=False)


def positioned(batches: Iterable[GlobalBatch], position: Position, plan: Plan) -> Iterator[Step]:
    """Global batches from a position to the end of its epoch, reading one batch ahead."""
    ahead = iter(batches)
    following = next(ahead, None)
    while following is not None:
        batch, following = following, next(ahead, None)
        position = advance(position, batch, plan, is_last=following is None)
        yield batch, Cursor(position, batch.state)


def in_blocks(steps: Iterator[Step], *, ahead: bool) -> Iterator[list[Step]]:
    """The same steps, made several at a time if they may be made ahead of their use.

    Between batches, the data and the training step displace this code from the caches, which makes
    it several times slower.
    """
    size = _BLOCK if ahead else 1
    return iter(lambda: list(itertools.islice(steps, size)), [])
