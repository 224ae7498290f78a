"""Reads runs for a report: all points, of which few are kept."""

import contextlib
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import attrs

from fxtrain._errors import PlanError
from fxtrain._reading import open_file, path_problem
from fxtrain.curves.curve import Curve
from fxtrain.curves.lines import LoggedTable, Piece, joined, ranges, read_piece

__all__ = ["RunCurves", "file_of", "read_curves"]

_PIECE_BYTES = 16 << 20
_CURVE_POINTS = 20_000  # of one curve
_PIECE_POINTS = 1000  # at least, of one curve in one part of a file
_ALL_POINTS = 90_000  # of all curves together: 4 MB in a page
_KEPT = (_CURVE_POINTS, _ALL_POINTS)
_FEWEST = 8
_LONGEST_LABEL = 200  # characters


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


def read_curves(
    folders: Sequence[Any], *, file: str = "metrics.jsonl", processes: int = 1
) -> tuple[RunCurves, ...]:
    """Read runs that `fx.JsonLines()` has logged.

    Args:
        folders: Folders of runs.
        file: File name in the tracker's config.
        processes: Number of processes that read. More than one needs a main module that can be
            imported: see Python's `multiprocessing`.

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
    runs: list[RunCurves] = []
    with _pool(processes, paths) as pool:
        parts = [_begin(pool, str(path)) for path in paths]
        for path, found in zip(paths, parts, strict=True):
            runs.append(_run(path, _folded(one() for one in found)))
    return _limited(_labelled(runs))


def _begin(pool: Any, path: str) -> list[Any]:
    """Begin to read each part of a file; parts keep twice the points that a page has."""
    found = ranges(path, _PIECE_BYTES)
    points, total = (max(_PIECE_POINTS, 2 * n // max(len(found), 1)) for n in _KEPT)
    return [pool(path, *one, points, total) for one in found]


def _folded(pieces: Iterable[Piece]) -> Piece:
    """The parts of a file as one; as many points as memory needs are dropped in between."""
    kept: list[Piece] = []
    for piece in pieces:
        kept.append(piece)
        if sum(_points(one) for one in kept) > 8 * _ALL_POINTS:
            whole = joined(kept)
            most = max(_FEWEST, 4 * _ALL_POINTS // max(len(whole.curves), 1))
            curves = {name: curve.limited(most) for name, curve in whole.curves.items()}
            kept = [attrs.evolve(whole, curves=curves)]
    return joined(kept)


def _points(piece: Piece) -> int:
    return sum(len(curve.values) for curve in piece.curves.values())


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
    inside = sorted(one.name for one in Path(folder).iterdir())
    inner = [name for name in inside if (Path(folder) / name / file).is_file()]
    advice = (
        f"Pass the runs in it: {', '.join(inner[:3])}"
        if inner
        else "A report shows what fx.JsonLines() has logged; pass --file if it has another name"
    )
    raise PlanError(
        f"report({str(folder)!r}): this folder has no {file}; found "
        f"{', '.join(inside[:5]) or 'nothing'}. {advice}."
    )


@contextlib.contextmanager
def _pool(processes: int, paths: Sequence[Path]) -> Iterator[Any]:
    """A function that begins to read a part, and returns one that waits for it."""
    pieces = sum(-(-path.stat().st_size // _PIECE_BYTES) for path in paths)
    if min(processes, pieces) <= 1:
        yield lambda *part: lambda: read_piece(*part)
        return
    # Not forked, since the caller may have threads.
    how = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, pieces), mp_context=how) as pool:
        yield lambda *part: pool.submit(read_piece, *part).result


def _run(path: Path, found: Piece) -> RunCurves:
    if not found.starts:
        raise PlanError(
            f"report: {path} has no line that starts a run, so fx.JsonLines() did not write it. "
            f"Pass the folder of a run."
        )
    first, last = found.starts[0], found.starts[-1]
    folder = path.parent
    return RunCurves(
        label=str(last["name"] or folder.name)[:_LONGEST_LABEL],
        folder=folder,
        curves=found.curves,
        params=last["params"],
        started=first["time"],
        resumed=found.started - 1,
        checkpoints=tuple(
            one for one in sorted(folder.glob("update-[0-9]*")) if (one / "manifest.json").is_file()
        ),
        artifacts=found.artifacts,
        tables=found.tables,
        left_out=found.left_out,
        damaged=found.damaged,
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
    return [attrs.evolve(run, label=one) for run, one in zip(runs, labels, strict=True)]


def _limited(runs: Sequence[RunCurves]) -> tuple[RunCurves, ...]:
    count = sum(len(run.curves) for run in runs)
    limit = max(_FEWEST, min(_CURVE_POINTS, _ALL_POINTS // max(count, 1)))
    return tuple(
        attrs.evolve(run, curves={name: one.limited(limit) for name, one in run.curves.items()})
        for run in runs
    )
