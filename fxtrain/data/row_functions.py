"""Data that a function makes for a position."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from torch import Tensor

from fxtrain import _tree
from fxtrain._errors import DataError
from fxtrain.data.rank_slices import Layout, Slot
from fxtrain.data.sources import Loaded, Source
from fxtrain.data.windows import Cursor, Step, advance
from fxtrain.state import Plan, Position


def function_source(
    make: Callable[[Position], Any], layout: Layout, plan: Plan, ranks: Sequence[int]
) -> Source:
    """An epoch without an end, of which a function makes the rows for some of the ranks.

    The function is called when its batch is due, and not before.
    """
    size, stride = layout.per_rank, layout.stride
    sizes = (size,) * layout.ranks
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
        position, held = cursor.position, cursor.held
        window = None if held is None else held + (plan.accumulate - position.micro) * stride
        while True:
            if not position.micro:
                window = plan.accumulate * stride
            slot = Slot(position.index, stride, sizes, sizes, ())
            data = rows_of(position)
            position = advance(position, slot, plan, is_last=False)
            yield Step(slot, position, window), data

    return Source(run=run, length=lambda: None, shuffled=lambda: False)


def _called(make: Callable[[Position], Any], position: Position, size: int) -> Any:
    rows = make(position)
    count = _tree.row_count(rows)
    if count != size:
        found = f"{type(rows).__name__} without rows" if count is None else f"{count} rows"
        raise DataError(
            f"The function of this loader returned {found} for index {position.index}, and the "
            f"loader has batch_size={size}. Return {size} rows for every position."
        )
    return rows


def _part(rows: Any, count: int, start: int, size: int) -> Any:
    """A rank's rows of a global batch."""

    def cut(leaf: Any) -> Any:
        whole = not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != count
        return leaf if whole else leaf.narrow(0, start, size)

    return _tree.map_leaves(cut, rows)
