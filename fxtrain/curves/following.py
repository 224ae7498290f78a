"""Follows a run that is being logged: reads only what was added since."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from fxtrain._reading import LONGEST_LINE, open_file
from fxtrain.curves.curve import Curve, join
from fxtrain.curves.lines import MOST_METRICS, parse_lines

__all__ = ["Followed", "follow", "sparkline"]

_READ_BYTES = 16 << 20
_POINTS = 400  # of one curve
_BARS = "▁▂▃▄▅▆▇█"


@attrs.frozen(kw_only=True)
class Followed:
    """What has been read of a file.

    Attributes:
        curves: By name of the metric.
        started: Whether a line that starts a run was read.
        damaged: Number of invalid lines.
        end: Bytes read, up to the end of a line.
        inside: Whether they end inside a line that is too long, which is skipped.
        file: Identity of the file, which changes when a resumed run rewrites it.
    """

    curves: Mapping[str, Curve] = attrs.field(factory=dict)
    started: bool = False
    damaged: int = 0
    end: int = 0
    inside: bool = False
    file: tuple[int, int] = (0, 0)


def follow(path: Path, seen: Followed) -> Followed:
    """Read the complete lines that were added to a file of the JSON lines tracker.

    A file that was replaced or truncated, as when a run is resumed, is read from its start.

    Args:
        seen: What was read before; `Followed()` at first.

    Raises:
        OSError: the file cannot be read.
    """
    with open_file(path) as file:
        facts = os.fstat(file.fileno())
        identity = (facts.st_dev, facts.st_ino)
        if identity != seen.file or facts.st_size < seen.end:
            seen = Followed(file=identity)
        file.seek(seen.end)
        rest = b""
        while data := file.read(_READ_BYTES):
            whole, newline, rest = (rest + data).rpartition(b"\n")
            seen = _added(seen, whole + newline)
            if seen.inside or len(rest) > LONGEST_LINE:
                damaged = seen.damaged + (not seen.inside)
                seen = attrs.evolve(seen, damaged=damaged, end=seen.end + len(rest), inside=True)
                rest = b""
    return seen


def _added(seen: Followed, data: bytes) -> Followed:
    if not data:
        return seen
    lines = data.partition(b"\n")[2] if seen.inside else data
    piece = parse_lines(lines, _POINTS)
    curves = dict(seen.curves)
    for name, curve in piece.curves.items():
        if name in curves or len(curves) < MOST_METRICS:
            added = join([curves[name], curve]) if name in curves else curve
            # Twice as many are kept, since each time extremes take the places of others.
            curves[name] = added.limited(2 * _POINTS)
    return attrs.evolve(
        seen,
        curves=curves,
        started=seen.started or bool(piece.starts),
        damaged=seen.damaged + piece.damaged,
        end=seen.end + len(data),
        inside=False,
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
    finite = [[one for one in part if math.isfinite(one)] for part in parts]
    means = [_mean(part) if part else math.nan for part in finite]
    known = [one for one in means if not math.isnan(one)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    return "".join(_bar(one, low, high) for one in means)


def _mean(values: Sequence[float]) -> float:
    # Divided before they are added, so that large values do not overflow; rounding must not make
    # bars of equal values differ.
    mean = sum(one / len(values) for one in values)
    return min(max(mean, min(values)), max(values))


def _bar(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return " "
    span = high / 2 - low / 2
    return _BARS[round((value / 2 - low / 2) / span * (len(_BARS) - 1))] if span > 0 else _BARS[0]
