"""Reads runs for a report, and follows those that are being logged: curves with few points."""

import contextlib
import json
import math
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

from fxtrain._reading import lines_of, open_file, path_problem
from fxtrain._record import shown
from fxtrain.errors import PlanError

try:  # four times as fast as Python's own
    from orjson import loads as _parse  # pyright: ignore[reportMissingImports]
except ImportError:
    from json import loads as _parse

_CURVE_POINTS = 20_000  # of one curve in a page
_ALL_POINTS = 90_000  # of all curves together: 4 MB in a page
_FOLLOWED_POINTS = 400  # of one curve that is followed
_FEWEST = 8  # points of a curve
MOST_METRICS = 10_000  # of a run; the values of further ones are counted
_MOST_FILES = 10_000  # artifacts
_MOST_TABLES = 100
_MOST_COLUMNS = 100
_TABLE_ROWS = 100
_LONGEST_LABEL = 200  # characters
_LONGEST_TEXT = 1000  # characters, as the tracker truncates settings
_LARGEST = 2**53  # the largest whole number that a float represents exactly
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


@attrs.define(kw_only=True, eq=False)
class RunCurves:
    """A run as a report shows it.

    Attributes:
        folder: Folder of the run.
        label: A name that no other run of the report has.
        curves: By name of the metric, in the order in which they were logged first.
        params: Hyperparameters of the latest start.
        started: Seconds since 1970, if known.
        starts: How often the run was started or resumed; 0 if the file is not that of a run.
        artifacts: Paths of logged files, by name.
        tables: Tables that were logged last, by name: the update (`step`), the `columns`, the first
            `rows`, and the `count` of all rows.
        left_out: Number of values of metrics beyond the first 10,000.
        damaged: Number of invalid lines that were skipped.
    """

    folder: Path
    label: str = ""
    curves: dict[str, Curve] = attrs.field(factory=dict)
    params: Mapping[str, Any] = attrs.field(factory=dict)
    started: float | None = None
    starts: int = 0
    artifacts: dict[str, str] = attrs.field(factory=dict)
    tables: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    left_out: int = 0
    damaged: int = 0

    def add(self, line: bytes, limit: int) -> None:
        """Add a line; about `limit` points of each curve are kept."""
        entry = _parsed(line)
        step = entry.get("step") if type(entry) is dict else None
        if type(step) is not int or not 0 <= step < _LARGEST:
            self.damaged += 1
        elif "values" in entry:
            if type(entry["values"]) is dict:
                place = (float(step), _axis(entry.get("rows")), _axis(entry.get("time")))
                self._add_values(entry["values"], place, limit)
        elif type(entry.get("start")) is dict:
            self._add_start(entry["start"], _number(entry.get("time")))
        elif type(entry.get("artifact")) is dict:
            self.artifacts |= {name: str(_plain(path)) for name, path in entry["artifact"].items()}
            _limit(self.artifacts, _MOST_FILES)
        elif type(entry.get("table")) is dict:
            tables = {name: _table(table, step) for name, table in entry["table"].items()}
            self.tables |= {name: table for name, table in tables.items() if table is not None}
            _limit(self.tables, _MOST_TABLES)

    def _add_values(
        self, values: Mapping[str, Any], place: tuple[float, float, float], limit: int
    ) -> None:
        for name, value in values.items():
            number = value if type(value) is float else _number(value)
            if number is None:
                continue
            curve = self.curves.get(name)
            if curve is None:
                if len(self.curves) >= MOST_METRICS:
                    self.left_out += 1
                    continue
                curve = self.curves[name] = Curve()
            curve.add(place, number, limit)

    def _add_start(self, start: Mapping[str, Any], time: float | None) -> None:
        if not self.starts:
            self.started = time
        self.starts += 1
        params = start.get("params")
        names = params if type(params) is dict else {}
        self.params = {name: _plain(value) for name, value in names.items()}
        self.label = str(_plain(start.get("name")) or self.folder.name)[:_LONGEST_LABEL]


def _plain(value: Any) -> Any:
    """A value as the tracker writes it; text for anything else, such as nested lists."""
    if type(value) is str:
        return value[:_LONGEST_TEXT]
    small = type(value) is int and -_LARGEST < value < _LARGEST
    return value if value is None or small or type(value) in (bool, float) else shown(value)


def _table(table: Any, step: int) -> dict[str, Any] | None:
    """A table as the tracker writes it; None for anything else."""
    columns, rows = map(table.get, ("columns", "rows")) if type(table) is dict else (None, None)
    if type(columns) is not list or type(rows) is not list or not columns:
        return None
    fits = (row for row in rows[:_TABLE_ROWS] if type(row) is list and len(row) == len(columns))
    return {
        "step": step,
        "columns": [str(_plain(name)) for name in columns[:_MOST_COLUMNS]],
        "rows": [[_plain(cell) for cell in row[:_MOST_COLUMNS]] for row in fits],
        "count": len(rows),
    }


def _limit(named: dict[str, Any], most: int) -> None:
    """Remove the oldest ones beyond a number."""
    for name in list(named)[: max(0, len(named) - most)]:
        del named[name]


def _parsed(line: bytes) -> Any:
    """What a line contains; None if it is no JSON."""
    for parse in (_parse, json.loads):  # Python accepts numbers and characters that orjson refuses
        with contextlib.suppress(ValueError, RecursionError):
            return parse(line)
    return None


def _number(value: Any) -> float | None:
    """A value as a number; the tracker writes non-finite ones as text."""
    if type(value) in (int, float, bool) or value in ("nan", "inf", "-inf"):
        with contextlib.suppress(OverflowError):
            return float(value)
    return None


def _axis(value: Any) -> float:
    """A position on an axis; NaN where there is none."""
    number = _number(value)
    return math.nan if number is None or not math.isfinite(number) else number


@attrs.define(kw_only=True, eq=False)
class RunReader:
    """Reads a file of the JSON lines tracker, and later what was added to it.

    Attributes:
        path: The file.
        points: About how many points of a curve to keep; at most twice as many.
        total: About how many points of all curves to keep.
        run: What the lines that were read contain.
    """

    path: Path
    points: int = _FOLLOWED_POINTS
    total: float = math.inf
    run: RunCurves = attrs.field(
        init=False,
        default=attrs.Factory(lambda self: RunCurves(folder=self.path.parent), takes_self=True),
    )
    end: int = attrs.field(default=0, init=False)  # bytes read, up to the end of a line
    # The file's identity, which changes when a resumed run rewrites it.
    file: tuple[int, int] = attrs.field(default=(0, 0), init=False)

    def read(self, *, ended: bool = False) -> "RunReader":
        """Read the lines that were added, and return the reader.

        A file that was replaced or truncated, as when a run is resumed, is read from its start.

        Args:
            ended: Whether to read a last line without a line break; otherwise it may be incomplete.

        Raises:
            OSError: the file cannot be read.
        """
        with open_file(self.path) as file:
            facts = os.fstat(file.fileno())
            identity = (facts.st_dev, facts.st_ino)
            if identity != self.file or facts.st_size < self.end:
                self.run = RunCurves(folder=self.path.parent)
                self.end, self.file = 0, identity
            file.seek(self.end)
            for line in lines_of(file):
                if line is None:
                    self.run.damaged += 1
                    self.end = file.tell()
                elif ended or line.endswith(b"\n"):
                    self.run.add(line, self._limit())
                    self.end += len(line)
                else:
                    break
        limit = self._limit()
        for curve in self.run.curves.values():
            if len(curve.values) > 2 * limit:
                curve.thin(limit)
        return self

    def _limit(self) -> int:
        count = max(len(self.run.curves), 1)
        return max(_FEWEST, int(min(self.points, self.total / count)))


def read_curves(folders: Sequence[Any], *, file: str = "metrics.jsonl") -> tuple[RunCurves, ...]:
    """Read runs that `fx.JsonLines()` has logged.

    Args:
        folders: Folders of runs.
        file: File name in the tracker's config.

    Raises:
        PlanError: a folder has no such run.
    """
    runs: list[RunCurves] = []
    for path in [file_of(folder, file) for folder in folders]:
        reader = RunReader(path=path, points=_CURVE_POINTS, total=_ALL_POINTS)
        runs.append(reader.read(ended=True).run)
        check_is_run(reader)
    curves = [curve for run in runs for curve in run.curves.values()]
    limit = max(_FEWEST, min(_CURVE_POINTS, _ALL_POINTS // max(len(curves), 1)))
    for curve in curves:
        if len(curve.values) > limit:
            curve.thin(limit)
    return _labeled(runs)


def check_is_run(reader: RunReader) -> None:
    """Refuse a file that `fx.JsonLines` did not write.

    Raises:
        PlanError: no line of the file starts a run.
    """
    if not reader.run.starts:
        raise PlanError(
            f"{reader.path} has no line that starts a run, so fx.JsonLines() did not write it. "
            f"Pass the folder of a run."
        )


def file_of(folder: Any, file: str) -> Path:
    """The file of the JSON lines tracker in the folder of a run.

    Raises:
        PlanError: there is no such file.
    """
    if problem := path_problem(folder):
        raise PlanError(f"The folder of a run: {problem}.")
    path = Path(folder, file)
    try:
        open_file(path).close()
    except OSError as error:
        if not Path(folder).is_dir():
            raise PlanError(
                f"{folder}: no such folder. Pass the folder of a run, into which fx.fit or "
                f"fx.track wrote."
            ) from error
        inner = sorted(each.parent.name for each in path.parent.glob(f"*/{file}"))
        advice = (
            f"Pass the runs in this folder: {', '.join(inner[:3])}"
            if inner
            else "fx.JsonLines() writes this file; pass --file if it has another name"
        )
        raise PlanError(f"{path}: {error.strerror}. {advice}.") from error
    return path


def _labeled(runs: Sequence[RunCurves]) -> tuple[RunCurves, ...]:
    """Runs with the same name are distinguished by their folders, then by numbers."""
    names, labels = [run.label for run in runs], list[str]()
    for run in runs:
        folder = os.path.abspath(run.folder)
        label = run.label if names.count(run.label) == 1 else f"{run.label} ({folder})"
        again = labels.count(label)
        labels.append(f"{label} #{again + 1}" if again else label)
    return tuple(map(lambda run, label: attrs.evolve(run, label=label), runs, labels))


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a line of bars, each the last of a part; values that are not finite are spaces.

    Example:
        >>> sparkline([0.0, 1.0, 2.0, float("nan"), 7.0], 5)
        '▁▂▃ █'
    """
    width = min(width, len(values))
    last = [values[(at + 1) * len(values) // width - 1] for at in range(width)]
    finite = [value for value in last if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    span = high / 2 - low / 2  # halved, since large values overflow

    def bar(value: float) -> str:
        if not math.isfinite(value):
            return " "
        return _BARS[round((value / 2 - low / 2) / (span or 1.0) * (len(_BARS) - 1))]

    return "".join(map(bar, last))
