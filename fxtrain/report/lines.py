"""Reads a part of a file of the JSON lines tracker; several processes read several parts."""

import contextlib
import gc
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from fxtrain._reading import open_file
from fxtrain.report.curves import Curve, downsample, join

try:  # four times as fast as Python's own
    from orjson import loads as _parse  # pyright: ignore[reportMissingImports]
except ImportError:
    from json import loads as _parse

__all__ = ["LoggedTable", "Piece", "joined", "parse_lines", "ranges", "read_piece"]

_TABLE_ROWS = 100
_BLOCK_BYTES = 1 << 19
_BLOCK_POINTS = 16  # at least, of one curve in one block
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
class Piece:
    """What a part of the file contains.

    Attributes:
        curves: By name of the metric.
        starts: The lines that were written when the run was opened or resumed.
        artifacts: Paths of logged files, by name.
        tables: The tables that were logged last, by name.
        damaged: Number of invalid lines.
    """

    curves: Mapping[str, Curve]
    starts: Sequence[Mapping[str, Any]]
    artifacts: Mapping[str, str]
    tables: Mapping[str, "LoggedTable"]
    damaged: int


def read_piece(path: str, start: int, end: int, points: int, total: int) -> Piece:
    """Read the lines that begin in a range of bytes.

    Args:
        points: About how many points of a curve to keep: see `parse_lines`.
        total: About how many points of all curves to keep.

    Raises:
        OSError: the file cannot be read.
    """
    with open_file(path) as file:
        if start:
            file.seek(start - 1)
            file.readline()  # belongs to the previous part, unless a line begins at `start`
        begin = file.tell()
        data = file.read(max(end - begin, 0))
        if begin < end:
            data += file.readline() if not data.endswith(b"\n") else b""
    return parse_lines(data, points, total)


def parse_lines(data: bytes, points: int, total: float = math.inf) -> Piece:
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


def joined(pieces: Sequence[Piece]) -> Piece:
    """Consecutive parts of a file as one."""
    names = dict.fromkeys(name for piece in pieces for name in piece.curves)
    return Piece(
        curves={
            name: join(piece.curves[name] for piece in pieces if name in piece.curves)
            for name in names
        },
        starts=[start for piece in pieces for start in piece.starts],
        artifacts={name: path for piece in pieces for name, path in piece.artifacts.items()},
        tables={name: table for piece in pieces for name, table in piece.tables.items()},
        damaged=sum(piece.damaged for piece in pieces),
    )


def _blocks(data: bytes) -> Iterator[bytes]:
    """Whole lines, of so few bytes that what is parsed of them fits the processor's cache."""
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + _BLOCK_BYTES) + 1 or len(data)
        yield data[start:end]
        start = end


def _piece(data: bytes, points: float, total: float) -> Piece:
    lines = _parsed(data)
    entries = [
        one
        for one in lines
        if type(one) is dict and type(one.get("step")) is int and 0 <= one["step"] < _LARGEST
    ]
    logged = [one for one in entries if "values" in one]
    starts: list[dict[str, Any]] = []
    artifacts: dict[str, str] = {}
    tables: dict[str, LoggedTable] = {}
    for entry in entries if len(logged) < len(entries) else ():
        if "values" in entry:
            continue
        if type(entry.get("start")) is dict:
            starts.append({"time": entry.get("time"), **entry["start"]})
        elif type(entry.get("artifact")) is dict:
            artifacts |= {name: str(one) for name, one in entry["artifact"].items()}
        elif type(entry.get("table")) is dict:
            found = {name: _table(one, entry["step"]) for name, one in entry["table"].items()}
            tables |= {name: one for name, one in found.items() if one is not None}
    return Piece(
        curves=_curves(logged, points, total),
        starts=starts,
        artifacts=artifacts,
        tables=tables,
        damaged=len(lines) - len(entries),
    )


def _table(table: Any, step: int) -> LoggedTable | None:
    """A table as the tracker writes it; None for anything else."""
    columns, rows = (table.get(one) if type(table) is dict else None for one in ("columns", "rows"))
    if type(columns) is not list or type(rows) is not list or not columns:
        return None
    shown = [row for row in rows[:_TABLE_ROWS] if type(row) is list and len(row) == len(columns)]
    return LoggedTable(step=step, columns=columns, rows=shown, count=len(rows))


def _parsed(data: bytes) -> list[Any]:
    """Each line as what it contains; None if it is no JSON."""
    text = data.removesuffix(b"\n")
    try:
        found = _parse(b"[%b]" % text.replace(b"\n", b","))
    except (ValueError, RecursionError):
        found = ()
    if len(found) == text.count(b"\n") + 1:
        return list(found)
    return [_parsed_line(line) for line in text.split(b"\n")]


def _parsed_line(line: bytes) -> Any:
    # Python accepts numbers and characters that orjson refuses.
    for parse in (_parse, json.loads):
        with contextlib.suppress(ValueError, RecursionError):
            return parse(line)
    return None


def _curves(entries: Sequence[Mapping[str, Any]], points: float, total: float) -> dict[str, Curve]:
    columns: dict[str, tuple[Sequence[int], Sequence[float]]] = {}
    for names, positions in _groups([entry["values"] for entry in entries]):
        # Entries with the same names are transposed together, which is fast.
        rows = zip(*(entries[one]["values"].values() for one in positions), strict=True)
        for name, column in zip(names, rows, strict=True):
            where, values = _numbers(positions, column)
            if name in columns:
                where, values = (*columns[name][0], *where), (*columns[name][1], *values)
            columns[name] = where, values
    kept = max(_BLOCK_POINTS, int(min(points, total / max(len(columns), 1))))
    return {
        name: _curve(entries, where, values, kept)
        for name, (where, values) in columns.items()
        if where
    }


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
    try:
        math.isfinite(sum(values))
        return where, values
    except (TypeError, OverflowError):
        numbers = [_number(one) for one in values]
    found = [at for at, one in zip(where, numbers, strict=True) if one is not None]
    return found, [one for one in numbers if one is not None]


def _curve(
    entries: Sequence[Mapping[str, Any]],
    where: Sequence[int],
    values: Sequence[float],
    points: int,
) -> Curve:
    if type(where) is tuple:  # of several groups
        order = sorted(range(len(where)), key=where.__getitem__)
        where, values = [where[one] for one in order], [values[one] for one in order]
    finite = math.isfinite(sum(values))
    kept = downsample(values, points, finite=finite)
    found = [entries[where[one]] for one in kept]
    return Curve(
        steps=_floats([entry["step"] for entry in found]),
        rows=_floats([entry.get("rows") for entry in found]),
        times=_floats([entry.get("time") for entry in found]),
        values=tuple([float(values[one]) for one in kept]),
        count=len(values),
        nonfinite=0 if finite else sum(not math.isfinite(v) for v in values),
    )


def _floats(values: Sequence[Any]) -> tuple[float, ...]:
    """Positions on an axis; NaN where there is none."""
    if set(map(type, values)) <= {int, float} and math.isfinite(sum(values)):
        return tuple(map(float, values))
    return tuple(map(_or_nan, values))


def _number(value: Any) -> float | None:
    """A value as a number; the tracker writes non-finite ones as text."""
    if type(value) in (int, float, bool) or value in ("nan", "inf", "-inf"):
        try:
            return float(value)
        except OverflowError:
            return None
    return None


def _or_nan(value: Any) -> float:
    number = _number(value)
    return math.nan if number is None or not math.isfinite(number) else number


def ranges(path: str, piece_bytes: int) -> list[tuple[int, int]]:
    """The ranges of bytes of the parts of a file."""
    size = os.stat(path).st_size
    return [(start, min(start + piece_bytes, size)) for start in range(0, size, piece_bytes)]
