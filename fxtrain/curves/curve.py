"""Curves with few points that keep the extremes of all points."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain

import attrs

_BARS = "▁▂▃▄▅▆▇█"


@attrs.frozen(kw_only=True)
class Curve:
    """The values of one metric, downsampled.

    Attributes:
        steps: Updates at each point.
        rows: Rows at each point; NaN where none were logged.
        times: Seconds since 1970 at each point; NaN where none were logged.
        values: The values, some of which may not be finite.
        count: Number of values that were logged.
        nonfinite: Number of those that are not finite.
    """

    steps: tuple[float, ...]
    rows: tuple[float, ...]
    times: tuple[float, ...]
    values: tuple[float, ...]
    count: int
    nonfinite: int = 0

    def limited(self, limit: int) -> "Curve":
        """The same curve with at most about `limit` points: see `downsample`."""
        if len(self.values) <= limit:
            return self
        kept = downsample(self.values, limit)
        columns = {
            name: tuple(map(getattr(self, name).__getitem__, kept))
            for name in ("steps", "rows", "times", "values")
        }
        return attrs.evolve(self, **columns)

    def axis(self, over: str) -> tuple[float, ...]:
        """The horizontal positions: updates, rows, or time in seconds since 1970."""
        return {"updates": self.steps, "rows": self.rows, "time": self.times}[over]


def downsample(values: Sequence[float], limit: int, *, finite: bool | None = None) -> list[int]:
    """The positions of the values to keep, in order.

    Values are divided into buckets of equal counts. Each keeps its minimum, its maximum and its
    first non-finite value, so no spike is lost. The first and the last value are kept as well.

    Args:
        limit: Number of positions, at least 5.
        finite: Whether all values are finite, if known.

    Example:
        >>> downsample([0.0, 1.0, 9.0, 1.0, 2.0, 1.0, -7.0, 1.0, 0.0, 3.0], 6)
        [0, 2, 6, 9]
    """
    count = len(values)
    if count <= limit:
        return list(range(count))
    everything_finite = math.isfinite(sum(values)) if finite is None else finite
    buckets = max(1, (limit - 2) // (2 if everything_finite else 3))
    kept = {0, count - 1}
    for bucket in range(buckets):
        start = bucket * count // buckets
        part = values[start : (bucket + 1) * count // buckets]
        real = part if everything_finite else [value for value in part if math.isfinite(value)]
        if real:
            kept.update((start + part.index(min(real)), start + part.index(max(real))))
        if len(real) < len(part):
            kept.add(start + next(at for at, value in enumerate(part) if not math.isfinite(value)))
    return sorted(kept)


def join(parts: Iterable[Curve]) -> Curve:
    """Curves of consecutive parts of a run as one curve."""
    curves = list(parts)
    if len(curves) == 1:
        return curves[0]
    columns = {
        name: tuple(chain.from_iterable(getattr(part, name) for part in curves))
        for name in ("steps", "rows", "times", "values")
    }
    return Curve(
        **columns,
        count=sum(part.count for part in curves),
        nonfinite=sum(part.nonfinite for part in curves),
    )


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
