"""Format dry runs: tables with one column each, and memory through one step as a chart."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxtrain._display import show_bytes
from fxtrain._optional import optional
from fxtrain.errors import escape_unprintable
from fxtrain.state import DryRun, Mesh, Traffic, diff
from fxtrain.state.dry_runs import PARTS

# A device more than this many times larger than the peak would leave nothing of it to see.
_MAX_DEVICE_RATIO = 4
# The palette of Okabe and Ito, which colour-blind people can tell apart, in the order of PARTS.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#999999")


def table(*runs: DryRun) -> RenderableType:
    """Tables of the results of dry runs, side by side, to print with rich.

    Args:
        runs: One or more dry runs; for several, a table also shows how their plans differ.
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
        sizes = [run.device_memory for run in runs]
        grid.add_row("device", *("not set" if x is None else show_bytes(x) for x in sizes))
    return grid


def _traffic(runs: Sequence[DryRun], names: Sequence[str]) -> Table:
    grid = _grid("traffic of one step", names)
    tables = [{f"{row.kind} over {row.axis}": row for row in run.step} for run in runs]
    for key in dict.fromkeys(key for rows in tables for key in rows):
        grid.add_row(_plain(key), *(_calls(rows.get(key)) for rows in tables))
    if not any(tables):
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


def plot(run: DryRun) -> Any:
    """What one rank holds through one step, as a `matplotlib.figure.Figure`.

    The horizontal axis counts allocations, not time. Save it with `savefig`, as SVG, PNG or PDF.

    Args:
        run: With a timeline, as `dry_run` returns it.

    Raises:
        MissingPackageError: matplotlib is not installed (the extra `plots`).
    """
    figure = optional("matplotlib.figure", extra="plots", needed_by="fxtrain.profiling.plot")
    drawn = figure.Figure(figsize=(8, 4), layout="constrained")
    axes = drawn.subplots()
    axes.set_title(f"{run.name}, rank {run.rank} of {run.world}: peak {show_bytes(run.peak)}",
                   loc="left", parse_math=False)  # fmt: skip
    axes.set_xlabel("one step, in allocations")
    axes.yaxis.set_major_formatter(lambda size, _: show_bytes(int(size)))
    moments = [*run.timeline, *run.timeline[-1:]]  # the last one has a width, too
    shown = [part for part in PARTS if any(getattr(moment, part) for moment in moments)]
    if shown:
        axes.stackplot(
            range(len(moments)),
            [[getattr(moment, part) for moment in moments] for part in shown],
            labels=shown,
            colors=[_COLOURS[PARTS.index(part)] for part in shown],
            step="post",
        )
    device = run.device_memory
    if device is not None and device < _MAX_DEVICE_RATIO * max(run.peak, 1):
        label = f"device, {show_bytes(device)}"
        axes.axhline(device, color="#d00000", linestyle="--", label=label)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    if axes.get_legend_handles_labels()[1]:
        drawn.legend(loc="outside lower center", ncols=4, frameon=False)
    return drawn
