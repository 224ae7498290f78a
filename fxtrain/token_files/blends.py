"""The order of a blend: which source gives each row, and which of its rows that is."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch

from fxtrain.data.order import permutation_in_blocks
from fxtrain.data.rank_slices import Batching, Cursor, GlobalBatch, StatefulOrder, global_batch
from fxtrain.errors import DataError
from fxtrain.token_files.records import Blend, constant_from, weight_at

_ROW = 1 << 40  # one row, in the integers in which shares are counted
_BLOCK = 1 << 10  # rows of a source whose numbers are computed at a time
_NEVER = 1 << 62


class BlendOrder(StatefulOrder):
    """The rows of a blend, in the place of a sampler.

    Each source has a cursor: how many of its rows were read. A state has all cursors by name, so
    that a blend with other weights or sources continues each source where it stood.

    Args:
        blend: Sources and weights.
        rows: Rows of each source. Row r of source s has the number `sum(rows[:s]) + r`.
        texts: What the rows of each source depend on.
        shuffle: Permute the rows of each source, by the seed and the pass over the source.
        block: Rows of a source that are visited together, as `BlockSampler` does.
    """

    def __init__(
        self,
        blend: Blend,
        rows: Sequence[int],
        texts: Sequence[str],
        *,
        shuffle: bool,
        block: int,
    ) -> None:
        self.blend, self.rows, self.shuffled = blend, tuple(rows), shuffle
        self._block = block
        self._names = [part.name for part in blend.parts]
        self._texts = dict(zip(self._names, texts, strict=True))
        self._constant = constant_from(blend)
        known = functools.lru_cache(maxsize=256)(self._shares_at)
        self._shares = lambda update: known(min(update, self._constant))

    def __iter__(self) -> Iterator[int]:
        raise DataError("A blend is read by the loader that fx.tokens returns. Iterate that one.")

    @property
    def endless(self) -> bool:
        """Whether an epoch has no end."""
        return self.blend.ends != "stop"

    def batches(
        self,
        batching: Batching,
        cursor: Cursor,
        ranks: Sequence[int],
        *,
        seed: int,
        accumulate: int,
    ) -> Iterator[GlobalBatch]:
        """Global batches from a cursor on, with the state after each.

        Raises:
            DataError: the cursor is inside an epoch and has no state, or the state is of other
                rows; or a source ended under `ends="error"`.
        """
        position, stride = cursor.position, batching.stride
        order = f"of seed {seed}" if self.shuffled else "of the files"
        cursors, ahead = self._restored(cursor, order)
        # Those of sources that the blend no longer has, too.
        texts = self._texts if cursor.state is None else cursor.state["texts"] | self._texts
        update, left = position.updates, max(1, accumulate - position.micro)
        turns = _turns(
            self._shares, ahead, update, self._constant, accumulate * stride, left * stride
        )
        numbers = [
            self._numbers(source, cursors[name][0], seed, position.epoch)
            for source, name in enumerate(self._names)
        ]
        first, over = position.index, False
        while not over:
            units: list[int] = []
            while len(units) < stride:
                source = next(turns)
                name = self._names[source]
                if cursors[name][0] >= self.rows[source] and self.blend.ends != "repeat":
                    over = self._end(source)
                    break
                units.append(next(numbers[source]))
                cursors[name][0] += 1
                ahead[source] -= _ROW
            if not units or (len(units) < stride and batching.even == "drop"):
                return
            shares = self._shares(update)
            ahead = [due + share * len(units) for due, share in zip(ahead, shares, strict=True)]
            # Padding repeats rows of the same batch: those of the start need another state.
            batch = global_batch(batching, first, units, ranks)
            yield batch._replace(state=self._state(cursors, ahead, order, texts))
            first, left = first + len(units), left - 1
            if not left:
                update, left = update + 1, accumulate

    def _numbers(self, source: int, read: int, seed: int, epoch: int) -> Iterator[int]:
        """Numbers of the rows of a source in their order, after those that were read."""
        name, rows, start = self._names[source], self.rows[source], sum(self.rows[:source])
        cycles, row = divmod(read, rows)
        for cycle in itertools.count(cycles if self.endless else cycles + epoch):
            find = None
            if self.shuffled:
                find = permutation_in_blocks(rows, self._block, seed, cycle, name)
            for low in range(row, rows, _BLOCK):
                places = torch.arange(low, min(low + _BLOCK, rows), device="cpu")
                yield from ((find(places) if find else places) + start).tolist()
            row = 0

    def _end(self, source: int) -> bool:
        if self.blend.ends == "error":
            raise DataError(
                f'tokens: source "{self._names[source]}" of this blend has no row after its '
                f'{self.rows[source]}. Add a source to the blend, or use ends="repeat" to read it '
                f'again, or "stop" to end the epoch there.'
            )
        return True

    def _shares_at(self, update: int) -> list[int]:
        """Shares of the sources in each row of an update; their sum is `_ROW`."""
        weights = [Fraction(weight_at(part.weight, update)) for part in self.blend.parts]
        total = sum(weights)
        shares = [int(weight * _ROW / total) for weight in weights]
        shares[weights.index(max(weights))] += _ROW - sum(shares)
        return shares

    def _state(
        self,
        cursors: dict[str, list[int]],
        ahead: list[int],
        order: str,
        texts: dict[str, str],
    ) -> dict[str, Any]:
        return {
            "order": order,
            "texts": texts,
            "cursors": {name: list(cursor) for name, cursor in cursors.items()},
            "ahead": dict(zip(self._names, ahead, strict=True)),
            "weights": self._weights(),
        }

    def _weights(self) -> dict[str, str]:
        return {part.name: repr(part.weight) for part in self.blend.parts}

    def _restored(self, cursor: Cursor, order: str) -> tuple[dict[str, list[int]], list[int]]:
        """By name, [rows read, rows] of each source; and the rows due to each, in `_ROW`."""
        position, state = cursor.position, cursor.state
        sizes = dict(zip(self._names, self.rows, strict=True))
        cursors = {name: [0, rows] for name, rows in sizes.items()}
        if state is None:
            if position.index:
                raise DataError(
                    f"tokens: epoch {position.epoch}, index {position.index} of a blend needs the "
                    f"cursors of its sources. Save loader.state() with the position, and use "
                    f"loader.at(position, state).",
                    code="FX401",
                )
            return cursors, [0] * len(sizes)
        if state["order"] != order:
            raise DataError(
                f"tokens: this blend was saved in the order {state['order']}, and is now in the "
                f"order {order}, in which rows would be repeated. Use the same seed and shuffle.",
                code="FX401",
            )
        cursors |= {name: list(saved) for name, saved in state["cursors"].items()}
        for name, rows in sizes.items():
            if cursors[name][1] != rows:
                raise DataError(
                    f'tokens: source "{name}" of this blend had {cursors[name][1]} rows when it '
                    f"was saved, and has {rows}. Use the same files and length, or another name "
                    f"to read it from its start.",
                    code="FX401",
                )
            if (saved := state["texts"].get(name, self._texts[name])) != self._texts[name]:
                raise DataError(
                    f'tokens: source "{name}" of this blend has other rows than when it was saved: '
                    f"{saved} then, {self._texts[name]} now. Use the same files, length and "
                    f"packing, or another name to read it from its start.",
                    code="FX401",
                )
        # Proportions count from the last change of the weights.
        same = state["weights"] == self._weights()
        return cursors, [state["ahead"][name] if same else 0 for name in self._names]


def _first_rows(
    share: Callable[[int], int], constant: int, due: int, update: int, end: int, rows: int
) -> Callable[[int], int]:
    """A function of rows due to a source, in units of its own, which never fall between calls.

    It returns the first row, from 1, with which as much is due.

    Args:
        share: Of each row of an update; constant from update `constant` on.
        due: Before the first row, which is one of `update`.
        end: The row after the last one of that update.
        rows: Of an update.
    """
    row = 0

    def reach(level: int) -> int:
        nonlocal due, update, end, row
        while True:
            # Without a share too: a run may resume after the last row that added to what is due.
            if due >= level:
                return row
            each, last = share(update), update >= constant
            if each and (last or due + each * (end - row) >= level):
                return row - (due - level) // each
            if last:
                return _NEVER
            due += each * (end - row)
            row, end, update = end, end + rows, update + 1

    return reach


def _turns(
    shares: Callable[[int], list[int]],
    ahead: Sequence[int],
    update: int,
    constant: int,
    rows: int,
    left: int,
) -> Iterator[int]:
    """The source of each next row.

    Of the sources to which a part of a row is due, the one that would be behind by a row first
    (R. Tijdeman, "The chairman assignment problem", 1980). With k sources, the rows read of each
    and the rows due to it differ by at most 1 - 1 / (2k - 2).
    """
    if len(ahead) == 1:
        yield from itertools.repeat(0)
    scale = 2 * len(ahead) - 2  # makes the bounds whole numbers
    row = _ROW * scale
    released, late = _ROW, row - _ROW

    def first_row(source: int) -> Callable[[int], int]:
        def share(update: int) -> int:
            return shares(update)[source] * scale

        return _first_rows(share, constant, ahead[source] * scale, update, left, rows)

    reach, read = [first_row(source) for source in range(len(ahead))], [0] * len(ahead)
    # Of each source, the rows from which and until which it may give its next one.
    turns = [(first(released), first(late)) for first in reach]
    for number in itertools.count(1):
        may = [source for source, (begin, _) in enumerate(turns) if begin <= number]
        source = min(may, key=lambda source: turns[source][1])
        yield source
        read[source] += row
        level = read[source]
        turns[source] = reach[source](level + released), reach[source](level + late)
