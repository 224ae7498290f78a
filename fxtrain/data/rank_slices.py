"""Which units each rank gets in each global batch, and the cursor after it, without data.

A unit is what is distributed over ranks: a row, a batch of a custom batch sampler, or an item
of a loader that does not batch.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import attrs
import torch

from fxtrain.data.order import EpochOrder
from fxtrain.errors import DataError
from fxtrain.state import Plan, Position

_FIRST_BLOCK, _BLOCK = 1 << 10, 1 << 14  # indices computed at a time


@attrs.frozen(kw_only=True)
class Batching:
    """How global batches are formed from the units of an epoch."""

    per_rank: int  # units of one rank in a full global batch
    ranks: int  # ranks that share the data
    even: Literal["pad", "drop", "uneven"] = "pad"  # what to do with the remaining units
    # "row": a rank's units are collated together; "batch": each is a list of indices; "item":
    # each is passed on unchanged.
    unit: Literal["row", "batch", "item"] = "row"
    shared: bool = False  # units are batches, of which every rank takes an equal part

    @property
    def stride(self) -> int:
        """Units in a full global batch."""
        return 1 if self.shared else self.per_rank * self.ranks

    @property
    def pads(self) -> bool:
        """Whether rows are repeated so that all ranks have equally many."""
        return self.even == "pad" and self.ranks > 1 and not self.shared

    def borrows(self, rank: int, units: int) -> bool:
        """Whether some rank also gets units from the start of the epoch, in a batch this long.

        Under `uneven`, that is a rank without a unit of its own, which gets them as placeholders.
        """
        real = units - rank * self.per_rank
        return not self.shared and real < (self.per_rank if self.pads else 1)

    def count(self, units: int) -> int:
        """Global batches in this many units."""
        whole, rest = divmod(max(0, units), self.stride)
        return whole + (rest > 0 and self.even != "drop")


class GlobalBatch(NamedTuple):
    """One global batch: the same on every rank except for the keys."""

    first: int  # index of its first unit in the epoch
    units: int  # units in it, without padding
    rows: tuple[int, ...]  # real rows on each rank
    sizes: tuple[int, ...]  # rows on each rank, including padding
    # For each served rank: what its dataset is asked for, a list for rows and batches.
    keys: tuple[Any, ...]
    # Of an order with cursors of its own, just after this batch; None for any other.
    state: Any = None


class StatefulOrder(ABC):
    """An order with cursors of its own, such as that of a blend, in the place of a sampler."""

    shuffled: bool  # whether epochs differ in their order

    @property
    @abstractmethod
    def endless(self) -> bool:
        """Whether an epoch has no end."""

    @abstractmethod
    def batches(
        self,
        batching: Batching,
        cursor: "Cursor",
        ranks: Sequence[int],
        *,
        seed: int,
        accumulate: int,
    ) -> Iterator[GlobalBatch]:
        """Global batches from a cursor on, each with the state after it."""


def batches_of_order(
    batching: Batching, order: EpochOrder, start: int, ranks: Sequence[int]
) -> Iterator[GlobalBatch]:
    """Global batches from an index of an order on, with keys for some of the ranks, in blocks.

    Raises:
        DataError: the order ends before the index.
    """
    size, stride = batching.per_rank, batching.stride
    if start > order.length:
        raise _beyond(start, order.length)
    whole, rest = divmod(order.length - start, stride)
    sizes, across = (size,) * batching.ranks, torch.arange(size, device="cpu")
    low, length = 0, _FIRST_BLOCK  # small at first, for a fast first batch
    while low < whole:
        steps = max(1, length // (size * max(1, len(ranks))))
        block = torch.arange(low, min(low + steps, whole), device="cpu")
        places = start + block[:, None] * stride + across
        columns = [order.take((places + rank * size).view(-1)) for rank in ranks]
        keys = [
            [_key(batching, units[at : at + size]) for at in range(0, len(units), size)]
            for units in columns
        ]
        rows = zip(*keys, strict=True) if keys else itertools.repeat(())
        for number, each in zip(block.tolist(), rows):  # noqa: B905 - the repetition has no end
            yield GlobalBatch(start + number * stride, stride, sizes, sizes, each)
        low, length = low + steps, min(2 * length, _BLOCK)
    first = start + whole * stride
    if rest and batching.even != "drop":
        units = order.take(torch.arange(first, order.length, device="cpu"))
        head = order.take(torch.arange(min(stride, order.length), device="cpu")) if ranks else units
        yield global_batch(batching, first, units, ranks, head)


def batches_of_stream(
    batching: Batching, units: Iterable[Any], start: int, ranks: Sequence[int]
) -> Iterator[GlobalBatch]:
    """Global batches from an index of a stream of units on, with keys for some of the ranks.

    Raises:
        DataError: the stream ends before the index.
    """
    stride, source = batching.stride, iter(units)
    head = list(itertools.islice(source, min(stride, start)))
    skipped = len(head) + sum(1 for _ in itertools.islice(source, max(0, start - stride)))
    if skipped < start:
        raise _beyond(start, skipped)
    first = start
    while units := list(itertools.islice(source, stride)):
        if len(units) < stride and batching.even == "drop":
            return
        head += units[: stride - len(head)]
        yield global_batch(batching, first, units, ranks, head)
        first += len(units)


def global_batch(
    batching: Batching,
    first: int,
    units: Sequence[Any],
    ranks: Sequence[int],
    head: Sequence[Any] | None = None,
) -> GlobalBatch:
    """Distribute the units of one global batch.

    Args:
        units: All of them; those of ranks that are not served, but the first, may be None.
        head: The first units of the epoch, with which a short global batch is padded. Under
            `uneven` they are placeholders of size 0 on ranks without a unit, so that every rank
            has data for the step. None pads from the batch itself, for data whose start is gone:
            a rank repeats its own units, or the first of the batch if it has none.
    """
    if batching.shared:
        return _shared_slot(batching, first, list(units[0]), ranks)
    dealt = [_rank_units(batching, units, head, rank) for rank in range(batching.ranks)]
    rows, sizes = zip(*[_rows(batching, local, real) for local, real in dealt], strict=True)
    keys = tuple(_key(batching, dealt[rank][0]) for rank in ranks)
    return GlobalBatch(first, len(units), rows, sizes, keys)


def _rank_units(
    batching: Batching, units: Sequence[Any], head: Sequence[Any] | None, rank: int
) -> tuple[list[Any], int]:
    """One rank's units, and how many of them are real."""
    low, size = rank * batching.per_rank, batching.per_rank
    local = list(units[low : low + size])
    real = len(local)
    if batching.borrows(rank, len(units)):
        # Padding continues from the start of the epoch, counted over all ranks.
        after, padding = max(0, low - len(units)), head
        if padding is None:
            after, padding = 0, local[:] or units[:1]
        local += [padding[(after + n) % len(padding)] for n in range(size - real)]
    return local, real


def _rows(batching: Batching, units: list[Any], real: int) -> tuple[int, int]:
    """Rows on a rank: the real ones, and all including padding."""
    if batching.unit == "batch":
        size = len(units[0])
        if not size:
            raise DataError("The batch sampler of this loader returned an empty batch.")
        return (size, size) if real else (0, size if batching.pads else 0)
    return real, len(units) if batching.pads else real


def _key(batching: Batching, units: list[Any]) -> Any:
    if batching.unit == "item":
        return units[0]
    return list(units[0]) if batching.unit == "batch" else units


def _beyond(start: int, length: int) -> DataError:
    return DataError(
        f"The position has index {start}, but an epoch of this loader ends at {length}: the "
        f"position was made with other data. Pass the loader that it was made with.",
        code="FX401",
    )


def _shared_slot(
    batching: Batching, first: int, batch: list[Any], ranks: Sequence[int]
) -> GlobalBatch:
    part, rest = divmod(len(batch), batching.ranks)
    if rest and (batching.even != "uneven" or not part):
        raise DataError(
            f'batch="global": batch {first} of the batch sampler has {len(batch)} rows, which '
            f"{batching.ranks} ranks cannot share equally. Make every batch a multiple of "
            f'{batching.ranks} rows, or use batch="per_rank".'
        )
    sizes = tuple(part + (rank < rest) for rank in range(batching.ranks))
    starts = [sum(sizes[:rank]) for rank in ranks]
    keys = tuple(batch[low : low + sizes[rank]] for low, rank in zip(starts, ranks, strict=True))
    return GlobalBatch(first, 1, sizes, sizes, keys)


class Cursor(NamedTuple):
    """A position, and the state of what is read there."""

    position: Position  # how far the run is
    state: Any = None  # of the stream or blend there, from which it continues


# A global batch, and the cursor just after it.
Step = tuple[GlobalBatch, Cursor]


def advance(
    position: Position, batch: GlobalBatch, plan: Plan, *, is_last: bool, order: str | None = None
) -> Position:
    """The position just after a global batch; with the order of the one before by default."""
    micro = position.micro + 1
    closes = micro >= plan.accumulate or (is_last and plan.flush)
    return Position(
        epoch=position.epoch,
        index=position.index + batch.units,
        samples=position.samples + sum(batch.rows),
        updates=position.updates + closes,
        micro=0 if closes else micro,
        is_last=is_last,
        order=position.order if order is None else order,
    )


def to_epoch(position: Position, epoch: int) -> Position:
    """The position at the start of a later epoch, with a window still open."""
    return attrs.evolve(position, epoch=epoch, index=0, is_last=False, order="")
