"""Format dry runs as tables, one column each."""

from collections.abc import Sequence
from typing import NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxtrain._byte_units import show_bytes
from fxtrain._errors import escape_unprintable
from fxtrain.state import PARTS, DryRun, Mesh, Traffic, diff


def table(*runs: DryRun) -> RenderableType:
    """Tables of the results of dry runs, side by side, to print with rich.

    Args:
        runs: One or more dry runs; for several, a table also shows how their plans differ.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.profiling import table
        >>> from rich.console import Console
        >>> small, large = (fx.DryRun(name="train.py", world=n) for n in (8, 1024))
        >>> console = Console(width=60)
        >>> with console.capture() as shown:
        ...     console.print(table(small, large))
        >>> [line.split() for line in shown.get().splitlines() if "1024 ranks" in line][0]
        ['8', 'ranks', '1024', 'ranks']
    """
    names = _names(runs)
    parts = [_memory(runs, names), _traffic(runs, names), *_plans(runs, names)]
    parts += [_problems(run, name) for run, name in zip(runs, names, strict=True) if run.problems]
    return Group(*parts)


def _names(runs: Sequence[DryRun]) -> list[str]:
    """Column titles: name, world size and mesh."""
    return [f"{run.name}\n{run.world} ranks\n{show_mesh(run.mesh)}" for run in runs]


def show_mesh(mesh: Mesh) -> str:
    """The axes of a mesh that have more than one rank."""
    axes = [f"{axis}={size}" for axis, size in mesh.sizes.items() if size != 1]
    return ", ".join(axes) or "one rank"


def _grid(title: str, names: Sequence[str]) -> Table:
    grid = Table(title, box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        grid.add_column(_plain(name), justify="right")
    return grid


def _plain(text: str) -> Text:
    """Text of a run, which may come from a file, without markup or control characters."""
    return Text(escape_unprintable(text))


def _memory(runs: Sequence[DryRun], names: Sequence[str]) -> Table:
    grid = _grid("memory of one rank", names)
    for part in PARTS:
        grid.add_row(part, *(show_bytes(getattr(run.memory, part)) for run in runs))
    grid.add_section()
    grid.add_row("peak of a step", *(show_bytes(run.peak) for run in runs))
    grid.add_row("until the first update", *(show_bytes(run.setup_peak) for run in runs))
    if any(run.device_memory is not None for run in runs):
        grid.add_row("device", *(_device(run) for run in runs))
    return grid


def _device(run: DryRun) -> str:
    return "not set" if run.device_memory is None else show_bytes(run.device_memory)


class _Kind(NamedTuple):
    """The key of a row of traffic."""

    kind: str
    axis: str


def _traffic(runs: Sequence[DryRun], names: Sequence[str]) -> Table:
    grid = _grid("traffic of one step", names)
    found = [{_Kind(row.kind, row.axis): row for row in run.step} for run in runs]
    for key in dict.fromkeys(key for rows in found for key in rows):
        grid.add_row(
            _plain(f"{key.kind} over {key.axis}"), *(_calls(rows.get(key)) for rows in found)
        )
    if not any(found):
        grid.add_row("none", *("" for _ in runs))
    return grid


def _calls(row: Traffic | None) -> str:
    return "" if row is None else f"{row.count} x {show_bytes(row.bytes // row.count)}"


def _plans(runs: Sequence[DryRun], names: Sequence[str]) -> list[Table]:
    """Where the plans of several runs differ."""
    first = runs[0].plan
    if first is None:
        return []
    rows: dict[str, list[str]] = {}
    for index, run in enumerate(runs):
        for change in () if run.plan is None else diff(first, run.plan):
            row = rows.setdefault(change.path, [str(change.left)] * len(runs))
            row[index] = str(change.right)
    if not rows:
        return []
    grid = _grid("plan", names)
    for path, row in rows.items():
        grid.add_row(*map(_plain, (path, *row)))
    return [grid]


def _problems(run: DryRun, name: str) -> Table:
    grid = Table(box=None, pad_edge=False, show_header=False, title_justify="left")
    grid.title = _plain(f"Problems of {name.replace(chr(10), ', ')}")
    for problem in run.problems:
        where = f"{problem.where}: " if problem.where else ""
        style = "bold red" if problem.fatal else "yellow"
        grid.add_row(Text("✗" if problem.fatal else "!", style=style), _plain(where + problem.text))
    return grid
