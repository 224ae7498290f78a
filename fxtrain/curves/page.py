"""The HTML page of a report, which stands alone and loads nothing, and one metric as a picture."""

import base64
import hashlib
import json
import math
import sys
from array import array
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from importlib.resources import files
from typing import Any, Literal

from fxtrain._optional import optional
from fxtrain._version import __version__
from fxtrain.curves.curve import Curve
from fxtrain.curves.reading import RunCurves
from fxtrain.curves.tables import tables_of, text_of
from fxtrain.errors import PlanError

_ASSETS = files("fxtrain.curves") / "assets"
# Metrics that `fx.fit` logs first, in this order; then all others as they were logged.
_FIRST = (
    "loss",
    "eval",
    "grad_norm",
    "skipped",
    "lr",
    "rows_per_s",
    "tokens_per_s",
    "waiting",
    "time",
    "memory_gib",
    "memory_peak_gib",
)
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; base-uri 'none'; \
form-action 'none'; img-src data:; style-src {styles}; script-src {scripts}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{library_css}</style>
<style>{css}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="quiet">fxtrain {version}</p>
</header>
<main>
{body}
</main>
<script type="application/json" id="data">{data}</script>
<script>{library}</script>
<script>{script}</script>
</body>
</html>
"""
# The palette of Okabe and Ito, which colour-blind people can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_SHOWN = 5


def page_of(runs: Sequence[RunCurves]) -> str:
    """The page of several runs.

    All text of the runs is escaped. A content security policy allows only the page's own scripts
    and no connection.

    Args:
        runs: As `read_curves` returns them.

    Example:
        >>> from pathlib import Path
        >>> from fxtrain.curves import RunCurves
        >>> run = RunCurves(label="a <b>", folder=Path("a"), curves={}, params={})
        >>> "a &lt;b&gt;" in page_of([run])
        True
    """
    css, library_css = _asset("page.css"), _asset("uPlot.min.css")
    script, library = _asset("page.js"), _asset("uPlot.iife.min.js")
    title = f"Report of {runs[0].label}" if len(runs) == 1 else f"Report of {len(runs)} runs"
    return _PAGE.format(
        styles=f"{_digest(library_css)} {_digest(css)}",
        scripts=f"{_digest(library)} {_digest(script)}",
        title=text_of(title),
        version=__version__,
        library_css=library_css,
        css=css,
        library=library,
        script=script,
        body=tables_of(runs, _metrics(runs)),
        data=_data(runs),
    )


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


def _charts(metrics: Sequence[str]) -> dict[str, list[str]]:
    """The metrics of each chart: `eval/loss` is in that of `loss`."""
    charts: dict[str, list[str]] = {}
    for name in metrics:
        trained = name.removeprefix("eval/")
        charts.setdefault(trained if trained in metrics else name, []).append(name)
    return charts


def _data(runs: Sequence[RunCurves]) -> str:
    """The curves as JSON in which no text can end the script element."""
    data = {
        "runs": [{"label": run.label, "start": _start(run)} for run in runs],
        "metrics": [
            {
                "name": chart,
                "curves": [
                    {"run": number, "name": name, **_columns(run.curves[name])}
                    for name in names
                    for number, run in enumerate(runs)
                    if name in run.curves
                ],
            }
            for chart, names in _charts(_metrics(runs)).items()
        ],
    }
    # ASCII, and without the characters that HTML or an old parser of scripts could read.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _start(run: RunCurves) -> float:
    """Where the axis of time begins."""
    times = [at for curve in run.curves.values() for at in curve.times if not math.isnan(at)]
    known = [*times, *([] if run.started is None else [run.started])]
    return min(known, default=0.0)


def _columns(curve: Curve) -> dict[str, Any]:
    return {
        "updates": _packed(curve.steps),
        "rows": _packed(curve.rows),
        "time": _packed(curve.times),
        "values": _packed(curve.values),
    }


def _packed(values: Iterable[float]) -> str:
    """Floats of 64 bits, little-endian, in base64: a browser decodes them without parsing."""
    column = array("d", values)
    if sys.byteorder == "big":
        column.byteswap()
    return base64.b64encode(column.tobytes()).decode()


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

    Example:
        >>> from pathlib import Path
        >>> from fxtrain.curves import Curve, RunCurves, picture_of
        >>> loss = Curve(steps=(1, 2), rows=(8, 16), times=(0, 1), values=(0.5, 0.25), count=2)
        >>> run = RunCurves(label="a", folder=Path("a"), curves={"loss": loss}, params={})
        >>> picture_of([run], "loss").axes[0].get_ylabel()
        'loss'
    """
    names = list(dict.fromkeys(name for run in runs for name in run.curves))
    if metric not in names:
        near = get_close_matches(metric, names, n=1)
        advice = f"Choose {near[0]!r}" if near else f"Choose one of: {', '.join(names[:_SHOWN])}"
        raise PlanError(
            f"report: the curve {metric!r} was requested, but no run has logged it. "
            + (f"{advice}." if names else "No metric has been logged.")
        )
    figure = optional("matplotlib.figure", extra="plots", needed_by="--curve")
    drawn = figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = drawn.subplots()
    for number, run in enumerate(runs):
        if metric in run.curves:
            xs = run.curves[metric].axis(over)
            first = min(xs, default=0.0) if run.started is None else run.started
            start = first if over == "time" else 0.0
            (line,) = axes.plot(
                [x - start for x in xs],
                run.curves[metric].values,
                color=_COLOURS[number % len(_COLOURS)],
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
