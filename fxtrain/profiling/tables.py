"""Format dry runs: tables with one column each, and memory through one step as a chart."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fxtrain._display import show_bytes
from fxtrain._drawing import COLORS, make_figure, make_table, plain_text
from fxtrain.state import DryRun, Mesh, Traffic, diff
from fxtrain.state.dry_runs import PARTS

# A device more than this many times larger than the peak would leave nothing of it to see.
_MAX_DEVICE_RATIO = 4


def table(*runs: DryRun) -> RenderableType:
    """Tables of the results of dry runs, side by side, to print with rich.

    Args:
        runs: One or more dry runs; for several, a table also shows how their plans differ.
    """
    names = [f"{run.name}\n{run.world} ranks\n{show_mesh(run.mesh)}" for run in runs]
    titles = [f">{name}" for name in names]
    tables = {
        "memory of one rank": _memory(runs),
        "traffic of one step": _traffic(runs),
        "plan": _plans(runs),
    }
    parts: list[RenderableType] = []
    for title, rows in tables.items():
        if rows:
            parts += [make_table((title, *titles), rows), ""]
    for run, name in zip(runs, names, strict=True):
        if run.problems:
            parts += _problems(run, name.replace("\n", ", "))
    return Group(*parts)


def show_mesh(mesh: Mesh) -> str:
    """The axes of a mesh that have more than one rank."""
    axes = [f"{axis}={size}" for axis, size in mesh.sizes.items() if size != 1]
    return ", ".join(axes) or "one rank"


def _memory(runs: Sequence[DryRun]) -> list[list[str]]:
    rows = [[part, *(show_bytes(getattr(run.memory, part)) for run in runs)] for part in PARTS]
    rows.append(["peak of a step", *(show_bytes(run.peak) for run in runs)])
    rows.append(["until the first update", *(show_bytes(run.setup_peak) for run in runs)])
    if any(run.device_memory is not None for run in runs):
        sizes = [run.device_memory for run in runs]
        rows.append(["device", *("not set" if x is None else show_bytes(x) for x in sizes)])
    return rows


def _traffic(runs: Sequence[DryRun]) -> list[list[str]]:
    tables = [{f"{row.kind} over {row.axis}": row for row in run.step} for run in runs]
    keys = dict.fromkeys(key for rows in tables for key in rows)
    return [[key, *(_calls(rows.get(key)) for rows in tables)] for key in keys] or [["none"]]


def _calls(row: Traffic | None) -> str:
    return "" if row is None else f"{row.count} x {show_bytes(row.bytes // row.count)}"


def _plans(runs: Sequence[DryRun]) -> list[list[str]]:
    """Where the plans of several runs differ."""
    first = runs[0].plan
    rows: dict[str, list[str]] = {}
    for index, run in enumerate(runs):
        for change in () if run.plan is None or first is None else diff(first, run.plan):
            row = rows.setdefault(change.path, [str(change.left)] * len(runs))
            row[index] = str(change.right)
    return [[path, *row] for path, row in rows.items()]


def _problems(run: DryRun, name: str) -> Iterable[Text]:
    yield plain_text(f"Problems of {name}")
    for problem in run.problems:
        where = f"{problem.where}: " if problem.where else ""
        mark = ("✗ ", "bold red") if problem.fatal else ("! ", "yellow")
        yield Text.assemble(mark, plain_text(where + problem.text))


def plot(run: DryRun) -> Any:
    """What one rank holds through one step, as a `matplotlib.figure.Figure`.

    The horizontal axis counts allocations, not time. Save it with `savefig`, as SVG, PNG or PDF.

    Args:
        run: With a timeline, as `dry_run` returns it.

    Raises:
        MissingPackageError: matplotlib is not installed (the extra `plots`).
    """
    title = f"{run.name}, rank {run.rank} of {run.world}: peak {show_bytes(run.peak)}"
    drawn = make_figure("fxtrain.profiling.plot", title)
    (axes,) = drawn.axes
    axes.set_xlabel("one step, in allocations")
    axes.yaxis.set_major_formatter(lambda size, _: show_bytes(int(size)))
    moments = [*run.timeline, *run.timeline[-1:]]  # the last one has a width, too
    shown = [part for part in PARTS if any(getattr(moment, part) for moment in moments)]
    if shown:
        axes.stackplot(
            range(len(moments)),
            [[getattr(moment, part) for moment in moments] for part in shown],
            labels=shown,
            colors=[COLORS[PARTS.index(part)] for part in shown],
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
