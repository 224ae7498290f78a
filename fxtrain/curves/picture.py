"""One metric as a picture, through matplotlib."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Literal

from fxtrain._errors import PlanError
from fxtrain._optional import optional
from fxtrain.curves.reading import RunCurves

# The palette of Okabe and Ito, which colour-blind people can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_SHOWN = 5


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
