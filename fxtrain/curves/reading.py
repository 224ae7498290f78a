"""Reads runs for a report, and follows those that are being logged."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from fxtrain._reading import LONGEST_LINE, open_file, path_problem
from fxtrain.curves.curve import Curve
from fxtrain.curves.lines import Contents, LoggedTable, joined, parse_lines
from fxtrain.errors import PlanError

_READ_BYTES = 16 << 20
_CURVE_POINTS = 20_000  # of one curve in a page
_ALL_POINTS = 90_000  # of all curves together: 4 MB in a page
_FOLLOWED_POINTS = 400  # of one curve that is followed
_FEWEST = 8
_LONGEST_LABEL = 200  # characters


@attrs.frozen(kw_only=True)
class Followed:
    """What has been read of a file.

    Attributes:
        contents: Of the lines that were read.
        end: Bytes read, up to the end of a line.
        inside: Whether they end inside a line that is too long, which is skipped.
        file: Identity of the file, which changes when a resumed run rewrites it.
    """

    contents: Contents = attrs.field(factory=Contents)
    end: int = 0
    inside: bool = False
    file: tuple[int, int] = (0, 0)

    @property
    def curves(self) -> Mapping[str, Curve]:
        """By name of the metric."""
        return self.contents.curves

    @property
    def started(self) -> bool:
        """Whether a line that starts a run was read."""
        return self.contents.started > 0

    @property
    def damaged(self) -> int:
        """Number of invalid lines."""
        return self.contents.damaged


def follow(
    path: Path,
    seen: Followed,
    *,
    points: int = _FOLLOWED_POINTS,
    total: float = math.inf,
    ended: bool = False,
) -> Followed:
    """Read the lines that were added to a file of the JSON lines tracker.

    A file that was replaced or truncated, as when a run is resumed, is read from its start.

    Args:
        seen: What was read before; `Followed()` at first.
        points: About how many points of a curve to keep, at least; at most twice as many, since
            each time extremes take the places of others.
        total: About how many points of all curves to keep.
        ended: Whether to read a last line without a line break; otherwise it may be incomplete.

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
            seen = _added(seen, whole + newline, facts.st_size, points, total)
            if seen.inside or len(rest) > LONGEST_LINE:
                seen = _skipped(seen, len(rest))
                rest = b""
    return _added(seen, rest, facts.st_size, points, total) if ended else seen


def _added(seen: Followed, data: bytes, size: int, points: int, total: float) -> Followed:
    if not data:
        return seen
    lines = data.partition(b"\n")[2] if seen.inside else data
    share = min(1.0, len(data) / max(size, 1))  # so that all parts of a file keep as much
    contents = joined([seen.contents, parse_lines(lines, points * share, total * share)])
    end = seen.end + len(data)
    contents = contents.limited(2 * points, 2 * total)
    return attrs.evolve(seen, contents=contents, end=end, inside=False)


def _skipped(seen: Followed, length: int) -> Followed:
    """The same after a part of a line that is too long, which is damaged."""
    damaged = seen.damaged + (not seen.inside)
    contents = attrs.evolve(seen.contents, damaged=damaged)
    return attrs.evolve(seen, contents=contents, end=seen.end + length, inside=True)


@attrs.frozen(kw_only=True)
class RunCurves:
    """A run as a report shows it.

    Attributes:
        label: A name that no other run of the report has.
        folder: Folder of the run.
        curves: By name of the metric, in the order in which they were logged first.
        params: Hyperparameters of the latest start.
        started: Seconds since 1970, if known.
        resumed: How often the run was resumed.
        checkpoints: Paths of its checkpoints, by updates.
        artifacts: Paths of logged files, by name.
        tables: Tables that were logged last, by name.
        left_out: Number of values of metrics beyond the first 10,000.
        damaged: Number of invalid lines that were skipped.
    """

    label: str
    folder: Path
    curves: Mapping[str, Curve]
    params: Mapping[str, Any]
    started: float | None = None
    resumed: int = 0
    checkpoints: tuple[Path, ...] = ()
    artifacts: Mapping[str, str] = attrs.field(factory=dict)
    tables: Mapping[str, LoggedTable] = attrs.field(factory=dict)
    left_out: int = 0
    damaged: int = 0


def read_curves(folders: Sequence[Any], *, file: str = "metrics.jsonl") -> tuple[RunCurves, ...]:
    """Read runs that `fx.JsonLines()` has logged.

    Args:
        folders: Folders of runs.
        file: File name in the tracker's config.

    Raises:
        PlanError: a folder has no such run.

    Example:
        >>> import fxtrain as fx, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> with fx.detect(env={}, device="cpu") as ctx, fx.track(folder, ctx) as run:
        ...     run.log({"loss": 0.5}, 1)
        >>> read_curves([folder])[0].curves["loss"].values
        (0.5,)
    """
    if not folders:
        raise PlanError("report: no run was passed. Pass the folders of one run or several.")
    paths = [file_of(folder, file) for folder in folders]
    runs = [_run(path, _contents(path)) for path in paths]
    return _limited(_labelled(runs))


def _contents(path: Path) -> Contents:
    """What a file contains, with twice the points that a page has."""
    points, total = 2 * _CURVE_POINTS, 2 * _ALL_POINTS
    return follow(path, Followed(), points=points, total=total, ended=True).contents


def file_of(folder: Any, file: str) -> Path:
    """The file of the JSON lines tracker in the folder of a run.

    Raises:
        PlanError: there is no such file.
    """
    if problem := path_problem(folder):
        raise PlanError(f"report: {problem}.")
    path = Path(folder) / file
    try:
        open_file(path).close()
        return path
    except FileNotFoundError:
        pass
    except OSError as error:
        raise PlanError(f"report: {error}.") from error
    if not Path(folder).is_dir():
        raise PlanError(f"report({str(folder)!r}): there is no such folder. Pass that of a run.")
    names = sorted(path.name for path in Path(folder).iterdir())
    inner = [name for name in names if (Path(folder) / name / file).is_file()]
    advice = (
        f"Pass the runs in it: {', '.join(inner[:3])}"
        if inner
        else "A report shows what fx.JsonLines() has logged; pass --file if it has another name"
    )
    raise PlanError(
        f"report({str(folder)!r}): this folder has no {file}; found "
        f"{', '.join(names[:5]) or 'nothing'}. {advice}."
    )


def _run(path: Path, contents: Contents) -> RunCurves:
    if not contents.starts:
        raise PlanError(
            f"report: {path} has no line that starts a run, so fx.JsonLines() did not write it. "
            f"Pass the folder of a run."
        )
    first, last = contents.starts[0], contents.starts[-1]
    folder = path.parent
    return RunCurves(
        label=str(last["name"] or folder.name)[:_LONGEST_LABEL],
        folder=folder,
        curves=contents.curves,
        params=last["params"],
        started=first["time"],
        resumed=contents.started - 1,
        checkpoints=tuple(
            checkpoint
            for checkpoint in sorted(folder.glob("update-[0-9]*"))
            if (checkpoint / "manifest.json").is_file()
        ),
        artifacts=contents.artifacts,
        tables=contents.tables,
        left_out=contents.left_out,
        damaged=contents.damaged,
    )


def _labelled(runs: Sequence[RunCurves]) -> list[RunCurves]:
    """Runs with the same name are told apart by their folders, then by numbers."""
    names = [run.label for run in runs]
    folders = [os.path.abspath(run.folder) for run in runs]
    labels: list[str] = []
    for name, folder in zip(names, folders, strict=True):
        label = name if names.count(name) == 1 else f"{name} ({folder})"
        again = labels.count(label)
        labels.append(f"{label} #{again + 1}" if again else label)
    return [attrs.evolve(run, label=label) for run, label in zip(runs, labels, strict=True)]


def _limited(runs: Sequence[RunCurves]) -> tuple[RunCurves, ...]:
    count = sum(len(run.curves) for run in runs)
    limit = max(_FEWEST, min(_CURVE_POINTS, _ALL_POINTS // max(count, 1)))
    return tuple(
        attrs.evolve(run, curves={name: curve.limited(limit) for name, curve in run.curves.items()})
        for run in runs
    )
