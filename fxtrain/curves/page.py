"""The HTML page of a report, which stands alone and loads nothing, and one metric as a picture."""

import base64
import hashlib
import html
import json
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from string import Template
from typing import Any, Literal, NamedTuple

from fxtrain._drawing import COLORS, make_figure
from fxtrain._other_names import closest
from fxtrain._version import __version__
from fxtrain.curves.reading import Curve, RunCurves
from fxtrain.errors import PlanError, escape_unprintable

_ASSETS = files("fxtrain.curves") / "assets"
# Metrics that `fx.fit` logs first, in this order; then all others as they were logged.
_FIRST = (
    "loss", "eval", "grad_norm", "skipped", "lr", "rows_per_s", "tokens_per_s", "waiting",
    "evaluate_s", "save_s", "time", "memory_gib", "memory_peak_gib",
)  # fmt: skip
_SHOWN = 5
_TOGETHER = 2  # runs whose curves of training and evaluation are in one chart
_MOST_SETTINGS = 6  # columns of the table of runs
# Parts of names of metrics that are better if they are lower.
_LOWER = ("loss", "error", "perplexity", "ppl", "nll", "mse", "mae", "wer", "cer")
_CENTURY_S = 3600 * 24 * 36_500


def page_of(runs: Sequence[RunCurves]) -> str:
    """The page of several runs.

    All text of the runs is escaped. A content security policy allows only the page's own scripts
    and no connection.

    Args:
        runs: As `read_curves` returns them.
    """
    css, library_css = _asset("page.css"), _asset("uPlot.min.css")
    script, library = _asset("page.js"), _asset("uPlot.iife.min.js")
    title = f"Report of {runs[0].label}" if len(runs) == 1 else f"Report of {len(runs)} runs"
    metrics = _metrics(runs)
    return Template(_asset("page.html")).substitute(
        styles=f"{_digest(library_css)} {_digest(css)}",
        scripts=f"{_digest(library)} {_digest(script)}",
        title=html_text(title),
        version=__version__,
        library_css=library_css,
        css=css,
        library=library,
        script=script,
        runs=_section("Runs", _runs(runs, metrics)),
        tables="\n".join(_tables(runs, metrics)),
        data=_data(runs, metrics),
    )


def _tables(runs: Sequence[RunCurves], metrics: Sequence[str]) -> Iterator[str]:
    yield _section("Values", _values(runs, metrics))
    logged = dict.fromkeys(name for run in runs for name in run.tables)
    if logged:
        shown = [_logged(name, run) for name in logged for run in runs if name in run.tables]
        yield _section("Tables", "\n".join(shown))
    settings = dict.fromkeys(name for run in runs for name in run.params)
    groups = {"plan.": "Plan", "": "Hyperparameters", "context.": "Environment"}
    for prefix, title in groups.items():
        others = tuple(other for other in groups if other and other != prefix)
        names = [x for x in settings if x.startswith(prefix) and not x.startswith(others)]
        yield _section(title, _compared(runs, names, prefix))
    yield _section("Checkpoints and files", _files(runs))


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _metrics(runs: Sequence[RunCurves]) -> list[str]:
    """The names of all metrics, in the order of the page."""
    names = dict.fromkeys(name for run in runs for name in run.curves)

    def place(name: str) -> int:
        for at, first in enumerate(_FIRST):
            if name == first or name.startswith(f"{first}/"):
                return at
        return len(_FIRST)

    return sorted(names, key=place)


def _charts(metrics: Sequence[str], *, together: bool) -> dict[str, list[str]]:
    """The metrics of each chart: `eval/loss` is in that of `loss`, if they are drawn together."""
    charts: dict[str, list[str]] = {}
    for name in metrics:
        trained = name.removeprefix("eval/")
        charts.setdefault(trained if together and trained in metrics else name, []).append(name)
    return charts


def _data(runs: Sequence[RunCurves], metrics: Sequence[str]) -> str:
    """The curves as JSON in which no text can end the script element."""
    data = {
        "runs": [{"label": run.label, "start": _start(run)} for run in runs],
        "metrics": [
            {
                "name": chart,
                "curves": [
                    {"run": number, "name": name, **_packed(run.curves[name])}
                    for name in names
                    for number, run in enumerate(runs)
                    if name in run.curves
                ],
            }
            for chart, names in _charts(metrics, together=len(runs) <= _TOGETHER).items()
        ],
    }
    # ASCII, and without the characters that HTML or an old parser of scripts could read.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _start(run: RunCurves) -> float:
    """Where the axis of time begins."""
    times = [at for curve in run.curves.values() for at in curve.axis("time") if not math.isnan(at)]
    known = [*times, *([] if run.started is None else [run.started])]
    return min(known, default=0.0)


def _packed(curve: Curve) -> dict[str, str]:
    """Floats of 64 bits, little-endian, in base64: a browser decodes them without parsing."""
    axes = {over: curve.axis(over) for over in ("updates", "rows", "time")}
    columns = {name: array("d", xs) for name, xs in {**axes, "values": curve.values}.items()}
    if sys.byteorder == "big":
        for column in columns.values():
            column.byteswap()
    return {name: base64.b64encode(column.tobytes()).decode() for name, column in columns.items()}


def picture_of(
    runs: Sequence[RunCurves], metric: str, *, over: Literal["updates", "rows", "time"] = "updates"
) -> Any:
    """The curves of one metric, as a `matplotlib.figure.Figure`.

    Save it with `savefig`, as SVG, PNG or PDF.

    Args:
        runs: As `read_curves` returns them.
        metric: Name of the metric.
        over: The horizontal axis; time is in seconds since each run started.

    Raises:
        PlanError: no run has this metric.
        MissingPackageError: matplotlib is not installed (the extra `plots`).
    """
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    if metric not in names:
        some = ", ".join(names[:_SHOWN]) or "none"
        raise PlanError(
            f"report: no run has logged the curve {metric!r}.{closest(metric, names)} Metrics that "
            f"have been logged: {some}."
        )
    drawn = make_figure("--curve", height=4.5)
    (axes,) = drawn.axes
    for number, run in enumerate(runs):
        if metric in run.curves:
            xs = run.curves[metric].axis(over)
            first = min(xs, default=0.0) if run.started is None else run.started
            start = first if over == "time" else 0.0
            (line,) = axes.plot(
                [x - start for x in xs],
                run.curves[metric].values,
                color=COLORS[number % len(COLORS)],
                linewidth=1.5,
            )
            line.set_label(run.label.replace("$", r"\$").removeprefix("_"))
    axes.set_xlabel("time in s" if over == "time" else over)
    axes.set_ylabel(metric, parse_math=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if len(runs) > 1:
        axes.legend(frameon=False)
    return drawn


def html_text(value: Any) -> str:
    """Any value as text that HTML shows as it is."""
    return html.escape(escape_unprintable(str(value)))


def _section(title: str, content: str) -> str:
    name = f"h-{title.split()[0].lower()}"
    return (
        f'<section aria-labelledby="{name}">\n<h2 id="{name}">{title}</h2>\n{content}\n</section>'
    )


def _table(title: str, head: Sequence[str], rows: Iterable[str], *, sorts: bool = False) -> str:
    """A table; with `sorts`, a click on the head of a column sorts the rows."""
    names = [html_text(name) for name in head]
    if sorts:
        names = [f'<button type="button" class="sort">{name}</button>' for name in names]
    columns = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{html_text(title)}"><table>\n'
        f"<thead><tr>{columns}</tr></thead>\n<tbody>\n"
        + "\n".join(rows)
        + "\n</tbody></table></div>"
    )


def _row(name: str, cells: Iterable[str], *, kind: str = "") -> str:
    inside = "".join(f"<td>{html_text(cell)}</td>" for cell in cells)
    return f'<tr{kind}><th scope="row">{name}</th>{inside}</tr>'


def _runs(runs: Sequence[RunCurves], metrics: Sequence[str]) -> str:
    """A row for each run, with its best value and the settings in which runs differ.

    Each cell has the value by which a script sorts the rows: a number, or text.
    """
    settings = _differing(runs)
    shown = settings[:_MOST_SETTINGS]
    best = _best_metric(metrics)
    head = [
        "Run", *([best.title] if best else []), *shown, "Updates", "Rows", "Duration",
        "Started (UTC)", "Resumed", "Damaged lines", "Folder",
    ]  # fmt: skip
    rows: list[str] = []
    for number, run in enumerate(runs):
        show = (
            f'<label><input type="checkbox" class="show" value="{number}" checked>'
            f'<svg class="key" data-run="{number}" width="26" height="10" aria-hidden="true">'
            f'<line x1="0" y1="5" x2="26" y2="5"/></svg>{html_text(run.label)}</label>'
        )
        updates, examples = _highest(run, "updates"), _highest(run, "rows")
        value = best.value(run) if best else None
        cells: list[tuple[str, object]] = [
            *([("-" if value is None else f"{value:.6g}", value)] if best else []),
            *((_setting(run, name), _setting(run, name)) for name in shown),
            (_count(updates), updates),
            (_count(examples), examples),
            (_duration(run), _seconds(run)),
            (_moment(run.started), run.started),
            (str(run.starts - 1), run.starts),
            (str(run.damaged), run.damaged),
            (str(run.folder), run.folder),
        ]
        inside = "".join(
            f'<td data-key="{html_text("" if key is None else key)}">{html_text(text)}</td>'
            for text, key in cells
        )
        label = html_text(run.label)
        rows.append(f'<tr><th scope="row" data-key="{label}">{show}</th>{inside}</tr>')
    left = len(settings) - len(shown)
    note = f"\n<p>{left} more settings differ: see Plan and Hyperparameters.</p>" if left else ""
    return _table("Runs", head, rows, sorts=len(runs) > 1) + note


class _BestMetric(NamedTuple):
    """A metric by which runs are compared, and whether it is better if it is lower."""

    name: str
    lower: bool

    @property
    def title(self) -> str:
        return f"{'Lowest' if self.lower else 'Highest'} {self.name}"

    def value(self, run: RunCurves) -> float | None:
        curve = run.curves.get(self.name)
        finite = [x for x in curve.values if math.isfinite(x)] if curve else []
        return (min if self.lower else max)(finite, default=None)


def _best_metric(metrics: Sequence[str]) -> _BestMetric | None:
    """The first metric of evaluation, or else the loss."""
    evaluated = (name for name in metrics if name == "eval" or name.startswith("eval/"))
    name = next(evaluated, "loss" if "loss" in metrics else None)
    if name is None:
        return None
    return _BestMetric(name, lower=any(part in name.lower() for part in _LOWER))


def _differing(runs: Sequence[RunCurves]) -> list[str]:
    """Settings in which runs differ, hyperparameters first; without what the machine decides."""
    names = dict.fromkeys(name for run in runs for name in run.params)
    different = [
        name
        for name in names
        if not name.startswith("context.")
        and name != "plan.fingerprint"
        and len({_setting(run, name) for run in runs}) > 1
    ]
    return sorted(different, key=lambda name: name.startswith("plan."))


def _values(runs: Sequence[RunCurves], metrics: Sequence[str]) -> str:
    if not metrics:
        return "<p>No metric has been logged.</p>"
    head = ("Metric", "Run", "Last", "Lowest", "Highest", "Values", "Not finite")
    rows = [
        _row(html_text(name), (run.label, *_facts(run.curves[name])))
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


def _logged(name: str, run: RunCurves) -> str:
    """A table that a run has logged, such as that of a profile."""
    table, label = run.tables[name], run.label
    rows = (_row(html_text(first), map(str, rest)) for first, *rest in table["rows"])
    left = table["count"] - len(table["rows"])
    return (
        f"<h3>{html_text(name)}: {html_text(label)}, update {table['step']:,}</h3>\n"
        + _table(f"{name}: {label}", table["columns"], rows)
        + (f"\n<p>{left:,} more rows are not shown.</p>" if left else "")
    )


def _compared(runs: Sequence[RunCurves], names: Sequence[str], prefix: str) -> str:
    """One column for each run; rows in which runs differ come first."""
    if not names:
        return "<p>None has been logged.</p>"
    different = {name for name in names if len({_setting(run, name) for run in runs}) > 1}
    rows = [
        _row(
            html_text(name.removeprefix(prefix))
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
    rows: list[str] = []
    for run in runs:
        for path in sorted(run.folder.glob("update-[0-9]*")):
            if (path / "manifest.json").is_file():
                link = html.escape(path.resolve().as_uri())
                name = f'<a href="{link}">{html_text(path.name)}</a>'
                rows.append(_row(name, (run.label, str(path))))
        rows += [_row(html_text(name), (run.label, x)) for name, x in run.artifacts.items()]
    if not rows:
        return "<p>None was found in the folders of the runs.</p>"
    return _table("Checkpoints and files", ("Name", "Run", "Path"), rows)


def _highest(run: RunCurves, over: str) -> float | None:
    places = (x for curve in run.curves.values() for x in curve.axis(over) if not math.isnan(x))
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


def _seconds(run: RunCurves) -> float | None:
    end = _highest(run, "time")
    if run.started is None or end is None or not 0 <= end - run.started < _CENTURY_S:
        return None
    return end - run.started


def _duration(run: RunCurves) -> str:
    seconds = _seconds(run)
    return "-" if seconds is None else str(timedelta(seconds=round(seconds)))
