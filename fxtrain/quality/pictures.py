"""Comparisons as pictures."""

import math
from typing import Any

from fxtrain._optional import optional
from fxtrain.quality.records import Comparison

__all__ = ["plot"]

# The palette of Okabe and Ito, which colour-blind people can tell apart.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#999999")


def plot(found: Comparison) -> Any:
    """Errors along the layers of a model, and losses, as a `matplotlib.figure.Figure`.

    Save it with `savefig`, as SVG, PNG or PDF.

    Args:
        found: What `compare` returned.

    Raises:
        MissingPackageError: matplotlib is not installed (the extra `plots`).

    Example:
        >>> import fxtrain as fx
        >>> found = fx.quality.Comparison(reference="fp32", weight_bytes=4000, plans=())
        >>> fx.quality.plot(found).axes[0].get_xlabel()
        'layers, in the order of the model'
    """
    figure = optional("matplotlib.figure", extra="plots", needed_by="fxtrain.quality.plot")
    drawn = figure.Figure(figsize=(8, 7 if found.losses else 4), layout="constrained")
    every = drawn.subplots(2 if found.losses else 1, squeeze=False)[:, 0]
    _draw_errors(every[0], found)
    if found.losses:
        _draw_losses(every[1], found)
    if found.plans:
        drawn.legend(*every[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return drawn


def _draw_errors(axes: Any, found: Comparison) -> None:
    axes.set_title(f"error relative to {found.reference}", loc="left", parse_math=False)
    axes.set_xlabel("layers, in the order of the model")
    axes.set_yscale("log")
    for number, plan in enumerate(found.plans):
        # A logarithmic axis has no place for an exact layer.
        errors = [one.relative or math.nan for one in plan.layers]
        axes.plot(errors, label=plan.name, color=_colour(number))


def _draw_losses(axes: Any, found: Comparison) -> None:
    axes.set_title("training loss", loc="left")
    axes.set_xlabel("updates")
    axes.plot(found.losses, label=found.reference, color="black", linestyle="--")
    for number, plan in enumerate(found.plans):
        axes.plot(plan.losses, label=plan.name, color=_colour(number))


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
