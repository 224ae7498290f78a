"""What lines of the JSON lines tracker contain."""

import contextlib
import gc
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from fxtrain._reading import LONGEST_LINE
from fxtrain._record import shown
from fxtrain.curves.curve import Curve, downsample, join

try:  # four times as fast as Python's own
    from orjson import loads as _parse  # pyright: ignore[reportMissingImports]
except ImportError:
    from json import loads as _parse

_TABLE_ROWS = 100
_BLOCK_BYTES = 1 << 19
_FEWEST = 8  # points of a curve
_BLOCK_POINTS = 16  # at least, of one curve in one block
MOST_METRICS = 10_000  # of a run; the values of further ones are counted
_MOST_TABLES = 100
_MOST_FILES = 10_000  # artifacts
_MOST_COLUMNS = 100
_LONGEST_TEXT = 1000  # characters, as the tracker truncates settings
_NUMBERS = {int, float, bool}
_LARGEST = 2**53  # the largest whole number that a float represents exactly


@attrs.frozen(kw_only=True)
class LoggedTable:
    """A table of `run.table`.

    Attributes:
        step: The update at which it was logged.
        columns: Their names.
        rows: The first ones.
        count: The number of all rows.
    """

    step: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    count: int


@attrs.frozen(kw_only=True)
class Contents:
    """What some lines of a run contain.

    Attributes:
        curves: By name of the metric; the first 10,000.
        left_out: Number of values of further metrics.
        starts: The first and the last line that was written when the run was opened or resumed.
        started: Number of such lines.
        artifacts: Paths of logged files, by name.
        tables: The tables that were logged last, by name.
        damaged: Number of invalid lines.
    """

    curves: Mapping[str, Curve] = attrs.field(factory=dict)
    left_out: int = 0
    starts: Sequence[Mapping[str, Any]] = ()
    started: int = 0
    artifacts: Mapping[str, str] = attrs.field(factory=dict)
    tables: Mapping[str, LoggedTable] = attrs.field(factory=dict)
    damaged: int = 0

    def limited(self, points: float, total: float) -> "Contents":
        """The same with at most about `points` of a curve, and few more than `total` of all."""
        if sum(len(curve.values) for curve in self.curves.values()) > 2 * total:
            points = min(points, total / len(self.curves))
        limit = max(_FEWEST, int(points))
        curves = {name: curve.limited(limit) for name, curve in self.curves.items()}
        return attrs.evolve(self, curves=curves)


def parse_lines(data: bytes, points: float, total: float = math.inf) -> Contents:
    """What some lines contain.

    Args:
        data: Lines of the tracker, the last of which may be incomplete.
        points: About how many points of a curve to keep. Each block of 512 KiB keeps its share, and
            at least 16, by `downsample`.
        total: About how many points of all curves to keep, if that is less.
    """
    share = min(1.0, _BLOCK_BYTES / max(len(data), 1))
    collects = gc.isenabled()
    gc.disable()  # it would visit every entry repeatedly, which doubles the time
    try:
        return joined([_piece(block, points * share, total * share) for block in _blocks(data)])
    finally:
        if collects:
            gc.enable()


def joined(pieces: Sequence[Contents]) -> Contents:
    """The contents of consecutive lines as one."""
    parts: dict[str, list[Curve]] = {}
    left_out = sum(piece.left_out for piece in pieces)
    for piece in pieces:
        for name, curve in piece.curves.items():
            if name in parts or len(parts) < MOST_METRICS:
                parts.setdefault(name, []).append(curve)
            else:
                left_out += curve.count
    artifacts = {name: path for piece in pieces for name, path in piece.artifacts.items()}
    tables = {name: table for piece in pieces for name, table in piece.tables.items()}
    starts = [start for piece in pieces for start in piece.starts]
    return Contents(
        curves={name: join(curves) for name, curves in parts.items()},
        left_out=left_out,
        starts=_ends(starts),
        started=sum(piece.started for piece in pieces),
        artifacts=_last(artifacts, _MOST_FILES),
        tables=_last(tables, _MOST_TABLES),
        damaged=sum(piece.damaged for piece in pieces),
    )


def _ends(starts: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return (starts[0], starts[-1]) if len(starts) > 2 else tuple(starts)


def _last(named: dict[str, Any], most: int) -> dict[str, Any]:
    return dict(list(named.items())[-most:])


def _blocks(data: bytes) -> Iterator[bytes]:
    """Whole lines, of so few bytes that what is parsed of them fits the processor's cache."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + _BLOCK_BYTES) + 1 or len(data)
        yield data[start:end]
        start = end


def _piece(data: bytes, points: float, total: float) -> Contents:
    lines = _parsed(data)
    entries = [
        line
        for line in lines
        if type(line) is dict and type(line.get("step")) is int and 0 <= line["step"] < _LARGEST
    ]
    logged = [entry for entry in entries if "values" in entry]
    starts: list[dict[str, Any]] = []
    artifacts: dict[str, str] = {}
    tables: dict[str, LoggedTable] = {}
    for entry in entries if len(logged) < len(entries) else ():
        if "values" in entry:
            continue
        if type(entry.get("start")) is dict:
            starts.append(_start(entry))
        elif type(entry.get("artifact")) is dict:
            artifacts |= {name: str(_plain(path)) for name, path in entry["artifact"].items()}
        elif type(entry.get("table")) is dict:
            for name, value in entry["table"].items():
                if (table := _table(value, entry["step"])) is not None:
                    tables[name] = table
    curves, left_out = _curves(logged, points, total)
    return Contents(
        curves=curves,
        left_out=left_out,
        starts=_ends(starts),
        started=len(starts),
        artifacts=_last(artifacts, _MOST_FILES),
        tables=_last(tables, _MOST_TABLES),
        damaged=len(lines) - len(entries),
    )


def _start(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a start: its time, its name and its parameters, all plain values."""
    start = entry["start"]
    params = start.get("params")
    return {
        "time": _number(entry.get("time")),
        "name": _plain(start.get("name")),
        "params": (
            {name: _plain(value) for name, value in params.items()} if type(params) is dict else {}
        ),
    }


def _plain(value: Any) -> Any:
    """A value as the tracker writes it; text for anything else, such as nested lists."""
    if type(value) is str:
        return value[:_LONGEST_TEXT]
    small = type(value) is int and -_LARGEST < value < _LARGEST
    return value if value is None or small or type(value) in (bool, float) else shown(value)


def _table(table: Any, step: int) -> LoggedTable | None:
    """A table as the tracker writes it; None for anything else."""
    columns, rows = map(table.get, ("columns", "rows")) if type(table) is dict else (None, None)
    if type(columns) is not list or type(rows) is not list or not columns:
        return None
    fits = (row for row in rows[:_TABLE_ROWS] if type(row) is list and len(row) == len(columns))
    return LoggedTable(
        step=step,
        columns=[str(_plain(name)) for name in columns[:_MOST_COLUMNS]],
        rows=[[_plain(cell) for cell in row[:_MOST_COLUMNS]] for row in fits],
        count=len(rows),
    )


def _parsed(data: bytes) -> list[Any]:
    """Each line as what it contains; None if it is no JSON."""
    text = data.removesuffix(b"\n")
    try:
        parsed = _parse(b"[%b]" % text.replace(b"\n", b",")) if len(text) <= LONGEST_LINE else ()
    except (ValueError, RecursionError):
        parsed = ()
    if len(parsed) == text.count(b"\n") + 1:
        return list(parsed)
    return [_parsed_line(line) for line in text.split(b"\n")]


def _parsed_line(line: bytes) -> Any:
    # Python accepts numbers and characters that orjson refuses.
    for parse in (_parse, json.loads) if len(line) <= LONGEST_LINE else ():
        with contextlib.suppress(ValueError, RecursionError):
            return parse(line)
    return None


def _curves(
    entries: Sequence[Mapping[str, Any]], points: float, total: float
) -> tuple[dict[str, Curve], int]:
    """The curves, and the number of values of metrics beyond the limit."""
    columns: dict[str, list[tuple[Sequence[int], Sequence[float]]]] = {}
    left_out = 0
    for names, positions in _groups([entry["values"] for entry in entries]):
        # Entries with the same names are transposed together, which is fast.
        rows = zip(*(entries[at]["values"].values() for at in positions), strict=True)
        for name, column in zip(names, rows, strict=True):
            if name in columns or len(columns) < MOST_METRICS:
                columns.setdefault(name, []).append(_numbers(positions, column))
            else:
                left_out += len(positions)
    limit = max(_BLOCK_POINTS, int(min(points, total / max(len(columns), 1))))
    curves: dict[str, Curve] = {}
    for name, parts in columns.items():
        where, values = parts[0] if len(parts) == 1 else _in_order(parts)
        if where:
            curves[name] = _curve(entries, where, values, limit)
    return curves, left_out


def _in_order(
    parts: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> tuple[Sequence[int], Sequence[float]]:
    """A column that several groups of entries have."""
    pairs = sorted(pair for part in parts for pair in zip(*part, strict=True))
    return [where for where, _ in pairs], [value for _, value in pairs]


def _groups(logged: Sequence[Any]) -> Iterable[tuple[tuple[str, ...], Sequence[int]]]:
    """Names of metrics, and the positions of the entries that have these, in this order."""
    kinds = set(map(type, logged))
    if kinds == {dict}:
        names = tuple(logged[0])
        if all(map(names.__eq__, map(tuple, logged))):
            return [(names, range(len(logged)))]
    groups: dict[tuple[str, ...], list[int]] = {}
    for position, values in enumerate(logged):
        if type(values) is dict:
            groups.setdefault(tuple(values), []).append(position)
    return groups.items()


def _numbers(where: Sequence[int], values: Sequence[Any]) -> tuple[Sequence[int], Sequence[float]]:
    """Those of the values that are numbers, and their positions."""
    floats = _as_floats(values)
    if floats is not None:
        return where, floats
    numbers = [_number(value) for value in values]
    positions = [at for at, number in zip(where, numbers, strict=True) if number is not None]
    return positions, [number for number in numbers if number is not None]


def _as_floats(values: Sequence[Any]) -> list[float] | None:
    """Numbers as floats; None if one is no number, or too large."""
    if not set(map(type, values)) <= _NUMBERS:
        return None
    try:
        return list(map(float, values))
    except OverflowError:
        return None


def _curve(
    entries: Sequence[Mapping[str, Any]],
    where: Sequence[int],
    values: Sequence[float],
    points: int,
) -> Curve:
    finite = math.isfinite(sum(values))
    kept = downsample(values, points, finite=finite)
    chosen = [entries[where[at]] for at in kept]
    return Curve(
        steps=_floats([entry["step"] for entry in chosen]),
        rows=_floats([entry.get("rows") for entry in chosen]),
        times=_floats([entry.get("time") for entry in chosen]),
        values=tuple([values[at] for at in kept]),
        count=len(values),
        nonfinite=0 if finite else sum(not math.isfinite(v) for v in values),
    )


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    """Positions on an axis; NaN where there is none."""
    floats = _as_floats(values)
    if floats is not None and math.isfinite(sum(floats)):
        return tuple(floats)
    return tuple(map(_or_nan, values))


def _number(value: Any) -> float | None:
    """A value as a number; the tracker writes non-finite ones as text."""
    if type(value) in _NUMBERS or value in ("nan", "inf", "-inf"):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def _or_nan(value: Any) -> float:
    number = _number(value)
    return math.nan if number is None or not math.isfinite(number) else number
