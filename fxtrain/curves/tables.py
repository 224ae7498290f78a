"""The tables of a report: HTML without scripts, in which all text is escaped."""

import html
import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fxtrain.curves.curve import Curve
from fxtrain.curves.reading import LoggedTable, RunCurves
from fxtrain.errors import escape_unprintable

_HOUR = 3600

_CONTROLS = """<section aria-labelledby="h-curves">
<h2 id="h-curves">Curves</h2>
<noscript><p>Curves need JavaScript; the tables below do not.</p></noscript>
<form id="controls" hidden>
<label>Over <select id="over"><option value="updates">updates</option>\
<option value="rows">rows</option><option value="time">time</option></select></label>
<label>Smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="0">\
<output for="smoothing" id="smoothed">0</output></label>
<label>Metrics <input id="filter" type="search" placeholder="part of a name" \
autocomplete="off"></label>
<label><input id="logarithmic" type="checkbox"> Logarithmic</label>
<button type="button" id="reset">Reset zoom</button>
</form>
<p class="quiet" id="keys" hidden>Drag to zoom, double-click to reset. With a chart in focus: \
arrow keys move along the curves, + and - zoom, Escape resets.</p>
<p id="status" role="status" class="unseen"></p>
<div id="charts"></div>
</section>"""


def tables_of(runs: Sequence[RunCurves], metrics: Sequence[str]) -> str:
    """The body of the page."""
    settings, plan, context = _settings(runs)
    return "\n".join(
        (
            _section("Runs", _runs(runs)),
            _CONTROLS,
            _section("Values", _values(runs, metrics)),
            *_logged(runs),
            _section("Plan", _compared(runs, plan)),
            _section("Hyperparameters", _compared(runs, settings)),
            _section("Environment", _compared(runs, context)),
            _section("Checkpoints and files", _files(runs)),
        )
    )


def text_of(value: Any) -> str:
    """Any value as text that HTML shows as it is."""
    return html.escape(escape_unprintable(str(value)))


def _section(title: str, content: str) -> str:
    name = f"h-{title.split()[0].lower()}"
    return (
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{title}</h2>\n{content}\n</section>'
    )


def _table(title: str, head: Sequence[str], rows: Iterable[str]) -> str:
    columns = "".join(f'<th scope="col">{text_of(name)}</th>' for name in head)
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{text_of(title)}"><table>\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _row(name: str, cells: Iterable[str], *, kind: str = "") -> str:
    inside = "".join(f"<td>{text_of(cell)}</td>" for cell in cells)
    return f'<tr{kind}><th scope="row">{name}</th>{inside}</tr>'


def _runs(runs: Sequence[RunCurves]) -> str:
    head = (
        "Run",
        "Folder",
        "Started (UTC)",
        "Duration",
        "Updates",
        "Rows",
        "Resumed",
        "Damaged lines",
    )
    rows = []
    for number, run in enumerate(runs):
        curves = list(run.curves.values())
        cells = (
            str(run.folder),
            _moment(run.started),
            _duration(run),
            _count(_highest(curves, "updates")),
            _count(_highest(curves, "rows")),
            str(run.resumed),
            str(run.damaged),
        )
        show = (
            f'<label><input type="checkbox" class="show" value="{number}" checked>'
            f'<svg class="key" data-run="{number}" width="26" height="10" aria-hidden="true">'
            f'<line x1="0" y1="5" x2="26" y2="5"/></svg>{text_of(run.label)}</label>'
        )
        rows.append(_row(show, cells))
    return _table("Runs", head, rows)


def _values(runs: Sequence[RunCurves], metrics: Sequence[str]) -> str:
    if not metrics:
        return "<p>No metric has been logged.</p>"
    head = ("Metric", "Run", "Last", "Lowest", "Highest", "Values", "Not finite")
    rows = [
        _row(text_of(name), (run.label, *_facts(run.curves[name])))
        for name in metrics
        for run in runs
        if name in run.curves
    ]
    left = sum(run.left_out for run in runs)
    note = f"\n<p>{left:,} values of further metrics are not shown.</p>" if left else ""
    return _table("Values", head, rows) + note


def _facts(curve: Curve) -> tuple[str, ...]:
    finite = [value for value in curve.values if math.isfinite(value)]
    low, high = (f"{min(finite):.6g}", f"{max(finite):.6g}") if finite else ("-", "-")
    return f"{curve.values[-1]:.6g}", low, high, _count(curve.count), _count(curve.nonfinite)


def _logged(runs: Sequence[RunCurves]) -> list[str]:
    """The tables that runs have logged, such as that of a profile."""
    names = dict.fromkeys(name for run in runs for name in run.tables)
    parts = [
        _logged_table(name, run.label, run.tables[name])
        for name in names
        for run in runs
        if name in run.tables
    ]
    return [_section("Tables", "\n".join(parts))] if parts else []


def _logged_table(name: str, label: str, table: LoggedTable) -> str:
    rows = (_row(text_of(first), map(str, rest)) for first, *rest in table.rows)
    left = table.count - len(table.rows)
    return (
        f"<h3>{text_of(name)}: {text_of(label)}, update {table.step:,}</h3>\n"
        + _table(f"{name}: {label}", table.columns, rows)
        + (f"\n<p>{left:,} more rows are not shown.</p>" if left else "")
    )


def _settings(runs: Sequence[RunCurves]) -> tuple[list[str], list[str], list[str]]:
    """The names of the hyperparameters: the user's own, the plan's, and the environment's."""
    names = list(dict.fromkeys(name for run in runs for name in run.params))
    plan = [name for name in names if name.startswith("plan.")]
    context = [name for name in names if name.startswith("context.")]
    return [name for name in names if name not in {*plan, *context}], plan, context


def _compared(runs: Sequence[RunCurves], names: Sequence[str]) -> str:
    """One column for each run; rows in which runs differ come first."""
    if not names:
        return "<p>None has been logged.</p>"
    different = {name for name in names if len({_setting(run, name) for run in runs}) > 1}
    rows = [
        _row(
            f"{text_of(name.removeprefix('plan.').removeprefix('context.'))}"
            + (' <span class="differs">differs</span>' if name in different else ""),
            (_setting(run, name) for run in runs),
            kind=' class="different"' if name in different else "",
        )
        for name in sorted(names, key=lambda name: name not in different)
    ]
    table = _table("Settings", ("Name", *(run.label for run in runs)), rows)
    if len(runs) == 1:
        return table
    count = f"{len(different)} of {len(names)} differ between the runs."
    return f"<p>{count}</p>\n{table}"


def _setting(run: RunCurves, name: str) -> str:
    return str(run.params[name]) if name in run.params else "-"


def _files(runs: Sequence[RunCurves]) -> str:
    rows = [
        _row(_link(path, path.name), (run.label, str(path)))
        for run in runs
        for path in run.checkpoints
    ]
    rows += [
        _row(text_of(name), (run.label, path))
        for run in runs
        for name, path in run.artifacts.items()
    ]
    if not rows:
        return "<p>None was found in the folders of the runs.</p>"
    return _table("Checkpoints and files", ("Name", "Run", "Path"), rows)


def _link(path: Path, text: str) -> str:
    return f'<a href="{html.escape(path.resolve().as_uri())}">{text_of(text)}</a>'


def _highest(curves: Iterable[Curve], over: str) -> float | None:
    places = [x for curve in curves for x in curve.axis(over) if not math.isnan(x)]
    return max(places, default=None)


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return str(seconds)


def _duration(run: RunCurves) -> str:
    end = _highest(run.curves.values(), "time")
    if run.started is None or end is None or not 0 <= end - run.started < _HOUR * 24 * 36_500:
        return "-"
    return str(timedelta(seconds=round(end - run.started)))
