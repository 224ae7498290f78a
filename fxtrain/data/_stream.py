"""Iterable datasets, cut so that the global order is that of the stream."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
from torch.utils.data import IterableDataset

from fxtrain.data._feed import worker_of
from fxtrain.data._slices import Layout, Mark

__all__ = ["Cut", "Stream", "keep"]


@attrs.frozen
class Cut:
    """One rank's batch of one step, as a worker ships it.

    Attributes:
        data: The collated rows, or None where the rank has none.
        mark: The step.
        following: The step after, where it is the last and some ranks have no row in it.
    """

    data: Any
    mark: Mark
    following: Mark | None = None


class Stream(IterableDataset[Cut]):
    """This worker's steps of an iterable dataset, for some ranks.

    Row i of the stream belongs to step i // stride, and step g to worker g modulo their
    number, so that neither ranks nor workers change the order. Every worker reads the whole
    stream and keeps its own rows.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        layout: Layout,
        ranks: tuple[int, ...],
    ) -> None:
        self.dataset, self.collate, self.layout, self.ranks = dataset, collate, layout, ranks
        self.epoch, self.start = 0, 0

    def __iter__(self) -> Iterator[Cut]:
        worker, workers = worker_of()
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        steps = _with_next(self._steps())
        for number, ((rows, count, padding), after) in enumerate(steps):
            if number % workers != worker:
                continue
            mark = self._mark(count, is_last=after is None)
            following = None
            if after is not None and after[1] < self.layout.stride:
                following = self._mark(after[1], is_last=True)
            for rank in self.ranks:
                mine = self._take(rows, count, padding, rank)
                yield Cut(self.collate(mine) if mine else None, mark, following)

    def _steps(self) -> Iterator[tuple[dict[int, Any], int, list[Any]]]:
        """Own rows by place in the step, how many rows the step has, rows to pad with."""
        layout = self.layout
        stride, pads = layout.stride, layout.even == "pad" and layout.ranks > 1
        own = {
            place
            for rank in self.ranks
            for place in range(rank * layout.per_rank, (rank + 1) * layout.per_rank)
        }
        rows: dict[int, Any] = {}
        head: list[Any] = []
        count = 0
        for number, row in enumerate(self.dataset):
            if pads and number < stride:
                head.append(row)
            if number < self.start:
                continue
            if count in own:
                rows[count] = row
            count += 1
            if count == stride:
                yield rows, count, head
                rows, count = {}, 0
        if count and layout.even != "drop":
            yield rows, count, head

    def _mark(self, count: int, *, is_last: bool) -> Mark:
        layout = self.layout
        size = layout.per_rank
        rows = tuple(min(size, max(0, count - rank * size)) for rank in range(layout.ranks))
        padded = layout.even == "pad" and layout.ranks > 1
        return Mark(rows, (size,) * layout.ranks if padded else rows, count, is_last)

    def _take(self, rows: dict[int, Any], count: int, head: list[Any], rank: int) -> list[Any]:
        places = range(rank * self.layout.per_rank, (rank + 1) * self.layout.per_rank)
        real = [rows[place] for place in places if place < count]
        if self.layout.even != "pad" or self.layout.ranks == 1:
            return real
        return real + [head[(place - count) % len(head)] for place in places if place >= count]


def keep(cut: Cut) -> Cut:
    """Collate nothing: the stream did."""
    return cut


def _with_next(items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of an item and the one after it, None at the end."""
    iterator = iter(items)
    before = next(iterator, None)
    while before is not None:
        after = next(iterator, None)
        yield before, after
        before = after
