"""Comparisons as tables and as pictures."""

import math
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxtrain._display import show_bytes
from fxtrain._optional import optional
from fxtrain.errors import escape_unprintable
from fxtrain.quality.comparing import Compared, Comparison

# The palette of Okabe and Ito, which colour-blind people can tell apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")


def table(comparison: Comparison, *, layers: int = 5) -> RenderableType:
    """Tables of a comparison, to print with rich.

    Args:
        comparison: What `compare` returned.
        layers: How many layers with the largest errors to show per plan.

    Example:
        >>> import fxtrain as fx
        >>> from rich.console import Console
        >>> comparison = fx.quality.Comparison(reference="fp32", weight_bytes=4000, plans=())
        >>> console = Console(width=80)
        >>> with console.capture() as shown:
        ...     console.print(fx.quality.table(comparison))
        >>> [line.split() for line in shown.get().splitlines() if "fp32" in line]
        [['fp32', '4.00', 'kB', 'reference']]
    """
    parts: list[RenderableType] = [_plans(comparison)]
    parts += [_layers(plan, layers) for plan in comparison.plans if layers and plan.layers]
    return Group(*parts)


def _plain(text: str) -> Text:
    return Text(escape_unprintable(text))


def _plans(comparison: Comparison) -> Table:
    columns = {
        "best agrees": [_number(plan.agreement, ".2%") for plan in comparison.plans],
        "smallest cosine": [_number(plan.cosine, ".5f") for plan in comparison.plans],
        "last loss": [
            _number(plan.losses[-1], ".4f") if plan.losses else "" for plan in comparison.plans
        ],
    }
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    grid = Table("plan", box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("weights", "error", "SNR", "largest difference", *shown):
        grid.add_column(title, justify="right")
    last = _number(comparison.losses[-1], ".4f") if comparison.losses else ""
    blank = [last if title == "last loss" else "" for title in shown]
    weights = show_bytes(comparison.weight_bytes)
    grid.add_row(_plain(comparison.reference), weights, "reference", "", "", *blank)
    for number, plan in enumerate(comparison.plans):
        outputs = plan.outputs
        cells = [cells[number] for cells in shown.values()]
        grid.add_row(
            _plain(plan.name), show_bytes(plan.weight_bytes), _number(outputs.relative, ".3g"),
            _decibels(outputs.snr_db), _number(outputs.largest, ".3g"), *cells,
        )  # fmt: skip
    return grid


def _layers(plan: Compared, count: int) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column(_plain(f"{plan.name}: largest errors"))
    grid.add_column("error", justify="right")
    grid.add_column("SNR", justify="right")
    worst = sorted(plan.layers, key=lambda layer: (not math.isnan(layer.relative), -layer.relative))
    for layer in worst[:count]:
        grid.add_row(_plain(layer.name), _number(layer.relative, ".3g"), _decibels(layer.snr_db))
    return grid


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _decibels(value: float) -> str:
    return "exact" if value == math.inf else f"{value:.1f} dB"


def plot(comparison: Comparison) -> Any:
    """Errors along the layers of a model, and losses, as a `matplotlib.figure.Figure`.

    Save it with `savefig`, as SVG, PNG or PDF.

    Args:
        comparison: What `compare` returned.

    Raises:
        MissingPackageError: matplotlib is not installed (the extra `plots`).

    Example:
        >>> import fxtrain as fx
        >>> comparison = fx.quality.Comparison(reference="fp32", weight_bytes=4000, plans=())
        >>> fx.quality.plot(comparison).axes[0].get_xlabel()
        'layers, in the order of the model'
    """
    figure = optional("matplotlib.figure", extra="plots", needed_by="fxtrain.quality.plot")
    drawn = figure.Figure(figsize=(8, 7 if comparison.losses else 4), layout="constrained")
    every = drawn.subplots(2 if comparison.losses else 1, squeeze=False)[:, 0]
    every[0].set_title(f"error relative to {comparison.reference}", loc="left", parse_math=False)
    every[0].set_xlabel("layers, in the order of the model")
    every[0].set_yscale("log")
    if comparison.losses:
        every[1].set_title("training loss", loc="left")
        every[1].set_xlabel("updates")
        every[1].plot(comparison.losses, label=comparison.reference, color="black", linestyle="--")
    for number, plan in enumerate(comparison.plans):
        colour = _COLOURS[number % len(_COLOURS)]
        # A logarithmic axis has no place for an exact layer.
        errors = [layer.relative or math.nan for layer in plan.layers]
        every[0].plot(errors, label=plan.name, color=colour)
        if comparison.losses:
            every[1].plot(plan.losses, label=plan.name, color=colour)
    if comparison.plans:
        drawn.legend(*every[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return drawn
