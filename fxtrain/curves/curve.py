"""Curves with few points that keep the extremes of all points."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import attrs

_BARS = "▁▂▃▄▅▆▇█"
_SLACK = 8  # times the limit of points before values are thinned out


def _extremes(values: Sequence[float], edges: Sequence[int]) -> list[int]:
    """Positions of the first and last value, and of the extremes between each two edges."""
    positions = {0, len(values) - 1}
    for start, end in pairwise(edges):
        part = values[start:end]
        if math.isfinite(sum(part)):
            positions.update((start + part.index(min(part)), start + part.index(max(part))))
            continue
        real = [value for value in part if math.isfinite(value)]
        if real:
            positions.update((start + part.index(min(real)), start + part.index(max(real))))
        if len(real) < len(part):
            positions.add(
                start + next(at for at, value in enumerate(part) if not math.isfinite(value))
            )
    return sorted(positions)


@attrs.define(kw_only=True)
class Curve:
    """The values of one metric, thinned out evenly once there are many.

    Attributes:
        places: Updates, rows and seconds since 1970 of each value that is kept; NaN where none were
            logged.
        values: The values that are kept, some of which may not be finite.
        numbers: Their numbers among all values.
        width: Number of consecutive values of which only extremes are kept; a power of two, so
            that buckets become parts of larger ones.
        count: Number of values that were logged.
        nonfinite: Number of those that are not finite.
    """

    places: list[tuple[float, float, float]] = attrs.field(factory=list)
    values: list[float] = attrs.field(factory=list)
    numbers: list[int] = attrs.field(factory=list)
    width: int = 1
    count: int = 0
    nonfinite: int = 0

    def axis(self, over: str) -> list[float]:
        """The horizontal positions: updates, rows, or time in seconds since 1970."""
        at = ("updates", "rows", "time").index(over)
        return [place[at] for place in self.places]

    def add(self, place: tuple[float, float, float], value: float, limit: int) -> None:
        """Add a value; about `limit` are kept, and at most eight times as many for a while."""
        self.places.append(place)
        self.values.append(value)
        self.numbers.append(self.count)
        self.count += 1
        if not math.isfinite(value):
            self.nonfinite += 1
        if len(self.values) > _SLACK * limit:
            self.thin(limit)

    def thin(self, limit: int) -> None:
        """Keep about `limit` values: the extremes and the first non-finite value of each bucket."""
        while 2 * self.count > self.width * limit:
            self.width *= 2
        edges = [0]
        while edges[-1] < len(self.numbers):
            bucket = self.numbers[edges[-1]] // self.width
            edges.append(bisect_left(self.numbers, (bucket + 1) * self.width, edges[-1]))
        positions = _extremes(self.values, edges)
        self.places = [self.places[at] for at in positions]
        self.values = [self.values[at] for at in positions]
        self.numbers = [self.numbers[at] for at in positions]


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a line of bars: the mean of each part; a part without finite values is a space.

    Example:
        >>> sparkline([0.0, 1.0, 2.0, float("nan"), 7.0], 5)
        '▁▂▃ █'
    """
    width = min(width, len(values))
    parts = [
        values[at * len(values) // width : (at + 1) * len(values) // width] for at in range(width)
    ]
    finite = [[value for value in part if math.isfinite(value)] for part in parts]
    means = [_mean(part) if part else math.nan for part in finite]
    known = [mean for mean in means if not math.isnan(mean)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return "".join(_bar(mean, low, high) for mean in means)


def _mean(values: Sequence[float]) -> float:
    # Divided before they are added, so that large values do not overflow; rounding must not make
    # bars of equal values differ.
    mean = sum(value / len(values) for value in values)
    return min(max(mean, min(values)), max(values))


def _bar(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return " "
    span = high / 2 - low / 2
    return _BARS[round((value / 2 - low / 2) / span * (len(_BARS) - 1))] if span > 0 else _BARS[0]
