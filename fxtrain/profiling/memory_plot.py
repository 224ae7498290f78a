"""Memory through one step as a stacked area chart."""

from typing import Any

from fxtrain._byte_units import show_bytes
from fxtrain._optional import optional
from fxtrain.state import PARTS, DryRun

# A device more than this many times larger than the peak would leave nothing of it to see.
_MAX_DEVICE_RATIO = 4
# The palette of Okabe and Ito, which colour-blind people can tell apart, in the order of PARTS.
_COLOURS = ("#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#999999")


def plot(run: DryRun) -> Any:
    """What one rank holds through one step, as a `matplotlib.figure.Figure`.

    The horizontal axis counts allocations, not time. Save it with `savefig`, as SVG, PNG or PDF.

    Args:
        run: With a timeline, as `dry_run` returns it.

    Raises:
        MissingPackageError: matplotlib is not installed (the extra `plots`).

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.profiling import plot
        >>> moments = fx.state.Memory(parameters=5), fx.state.Memory(parameters=5, activations=3)
        >>> figure = plot(fx.DryRun(name="train.py", world=8, peak=8, timeline=moments))
        >>> figure.axes[0].get_title(loc="left")
        'train.py, rank 0 of 8: peak 8 B'
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
