"""Reads a part of a file of the JSON lines tracker; several processes read several parts."""

import gc
import json
import math
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from fxtrain._reading import open_file
from fxtrain.report.curves import Curve, downsample

try:  # four times as fast as Python's own
    from orjson import loads as _parse  # pyright: ignore[reportMissingImports]
except ImportError:
    from json import loads as _parse

__all__ = ["Piece", "parse_lines", "ranges", "read_piece"]

_LARGEST = 2**53  # the largest whole number that a float represents exactly


@attrs.frozen(kw_only=True)
class Piece:
    """What a part of the file contains.

    Attributes:
        curves: By name of the metric.
        starts: The lines that were written when the run was opened or resumed.
        artifacts: Paths of logged files, by name.
        damaged: Number of invalid lines.
    """

    curves: Mapping[str, Curve]
    starts: Sequence[Mapping[str, Any]]
    artifacts: Mapping[str, str]
    damaged: int


def read_piece(path: str, start: int, end: int, points: int) -> Piece:
    """Read the lines that begin in a range of bytes.

    Args:
        points: How many points of a curve to keep: see `downsample`.

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
    return parse_lines(data, points)


def parse_lines(data: bytes, points: int) -> Piece:
    """What some lines contain.

    Args:
        data: Lines of the tracker, the last of which may be incomplete.
        points: How many points of a curve to keep: see `downsample`.
    """
    collects = gc.isenabled()
    gc.disable()  # it would visit every entry repeatedly, which doubles the time
    try:
        return _piece(data, points)
    finally:
        if collects:
            gc.enable()


def _piece(data: bytes, points: int) -> Piece:
    entries: list[dict[str, Any]] = []
    starts: list[dict[str, Any]] = []
    artifacts: dict[str, str] = {}
    damaged = 0
    for entry in _entries(data):
        if entry is None:
            damaged += 1
        elif "values" in entry:
            entries.append(entry)
        elif type(entry.get("start")) is dict:
            starts.append({"time": entry.get("time"), **entry["start"]})
        elif type(entry.get("artifact")) is dict:
            artifacts |= {name: str(one) for name, one in entry["artifact"].items()}
    curves = _curves(entries, points)
    return Piece(curves=curves, starts=starts, artifacts=artifacts, damaged=damaged)


def _entries(data: bytes) -> Iterator[dict[str, Any] | None]:
    lines = data.split(b"\n")
    for line in lines if lines[-1] else lines[:-1]:
        try:
            found = _parse(line)
        except (ValueError, RecursionError):
            found = _parsed_by_python(line)
        step = found.get("step") if type(found) is dict else None
        yield found if type(step) is int and 0 <= step < _LARGEST else None


def _parsed_by_python(line: bytes) -> Any:
    """A line that orjson may have refused for a number or a character that Python accepts."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _curves(entries: Sequence[Mapping[str, Any]], points: int) -> dict[str, Curve]:
    # Entries with the same names are transposed together, which is fast.
    groups: dict[tuple[str, ...], list[int]] = {}
    for position, entry in enumerate(entries):
        if type(entry["values"]) is dict:
            groups.setdefault(tuple(entry["values"]), []).append(position)
    columns: dict[str, tuple[list[int], array[float]]] = {}
    for names, positions in groups.items():
        rows = zip(*(entries[one]["values"].values() for one in positions), strict=True)
        for name, column in zip(names, rows, strict=True):
            where, values = _numbers(positions, column)
            if name in columns:
                where, values = columns[name][0] + where, columns[name][1] + values
            columns[name] = where, values
    return {
        name: _curve(entries, where, values, points)
        for name, (where, values) in columns.items()
        if where
    }


def _numbers(where: list[int], values: Sequence[Any]) -> "tuple[list[int], array[float]]":
    """Those of the values that are numbers, and their positions."""
    try:
        return where, array("d", values)
    except (TypeError, OverflowError):
        numbers = [_number(one) for one in values]
    found = [at for at, one in zip(where, numbers, strict=True) if one is not None]
    return found, array("d", [one for one in numbers if one is not None])


def _curve(
    entries: Sequence[Mapping[str, Any]], where: list[int], values: "array[float]", points: int
) -> Curve:
    if where != sorted(where):
        order = sorted(range(len(where)), key=where.__getitem__)
        where, values = [where[one] for one in order], array("d", [values[one] for one in order])
    finite = math.isfinite(sum(values))
    kept = downsample(values, points)
    found = [entries[where[one]] for one in kept]
    return Curve(
        steps=_floats([entry["step"] for entry in found]),
        rows=_floats([entry.get("rows") for entry in found]),
        times=_floats([entry.get("time") for entry in found]),
        values=tuple([values[one] for one in kept]),
        count=len(values),
        nonfinite=0 if finite else sum(not math.isfinite(one) for one in values),
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
