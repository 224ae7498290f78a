"""The plans that a search found, fastest first, as a table, a picture and plain data."""

from collections.abc import Iterator
from typing import Any

import attrs
from rich.console import Group, RenderableType

from fxtrain._display import show_bytes
from fxtrain._drawing import COLORS, make_figure, make_table, plain_text
from fxtrain.choosing.costs import StepCost
from fxtrain.choosing.devices import Device
from fxtrain.errors import PlanError
from fxtrain.profiling.tables import show_mesh
from fxtrain.state import Plan, unstructure

_PARTS = ("compute", "memory", "launches", "links", "bubbles")
_MOST_REASONS = 8


@attrs.frozen(kw_only=True)
class ChoiceRow:
    """A plan that was tried.

    Attributes:
        plan: With its mesh and `accumulate`.
        batch_size: Rows of a batch of the loader.
        rows: Rows of an update.
        memory: Peak bytes of a rank.
        cost: Seconds of an update, by what takes them.
    """

    plan: Plan
    batch_size: int
    rows: int
    memory: int
    cost: StepCost

    @property
    def rows_per_s(self) -> float:
        """Rows per second of all ranks together."""
        return self.rows / self.cost.seconds


@attrs.frozen(kw_only=True)
class Choice:
    """The fastest plans that fit, and why others were dropped. Print it with `rich.print`.

    Attributes:
        world: World size.
        device: That each rank has.
        rows: Rows of an update.
        table: The ten fastest plans that fit, fastest first.
        dropped: Reasons, each with the number of plans.
        sensitivity: Other devices in words, each with the plan that is fastest there; None where no
            plan that was tried fits.
        advice: If no plan fits, the smallest change with which one would.
        tried: Number of plans with a dry run.
    """

    world: int
    device: Device
    rows: int
    table: tuple[ChoiceRow, ...]
    dropped: tuple[tuple[str, int], ...] = ()
    sensitivity: tuple[tuple[str, ChoiceRow | None], ...] = ()
    advice: str = ""
    tried: int = 0

    @property
    def best(self) -> ChoiceRow:
        """The fastest plan that fits, with its figures.

        Raises:
            PlanError: none fits.
        """
        if not self.table:
            raise PlanError(f"No plan fits. {self.advice}")
        return self.table[0]

    @property
    def plan(self) -> Plan:
        """The fastest plan that fits; a PlanError if none does."""
        return self.best.plan

    def data(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        other = [(text, row and _row_data(row)) for text, row in self.sensitivity]
        return {
            **{name: getattr(self, name) for name in ("world", "rows", "advice", "tried")},
            "device": unstructure(self.device),
            "plans": [_row_data(row) for row in self.table],
            "dropped": [{"reason": text, "plans": count} for text, count in self.dropped],
            "sensitivity": [{"with": text, "best": row} for text, row in other],
        }

    def plot(self) -> Any:
        """Where the time of an update goes for each plan, as a `matplotlib.figure.Figure`.

        Raises:
            MissingPackageError: matplotlib is not installed (the extra `plots`).
        """
        title = f"{self.rows:,} rows on {self.world} x {self.device.name}"
        drawn = make_figure("fx.tuning.Choice.plot", title, height=1.5 + 0.4 * len(self.table))
        (axes,) = drawn.axes
        names = [name_row(row) for row in reversed(self.table)]
        left = [0.0] * len(names)
        for number, part in enumerate(_PARTS):
            widths = [attrs.astuple(row.cost)[number] for row in reversed(self.table)]
            axes.barh(names, widths, left=left, label=part, color=COLORS[number])
            left = [start + width for start, width in zip(left, widths, strict=True)]
        axes.set_xlabel("seconds of an update")
        drawn.legend(loc="outside lower center", ncols=5, frameon=False)
        return drawn

    def __rich__(self) -> RenderableType:
        return Group(*self._parts())

    def _parts(self) -> Iterator[RenderableType]:
        title = f"{self.rows:,} rows of an update on {self.world} x {self.device.name}"
        columns = ("plan", ">memory", ">step", ">rows/s", "limited by")
        if self.table:
            yield make_table(columns, [_cells(row) for row in self.table], title=title)
        else:
            yield plain_text(f"{title}: no plan fits. {self.advice}")
        if any(row is not None for _, row in self.sensitivity):
            rows = [
                (text, "none of the plans that were tried" if row is None else name_row(row),
                 "" if row is None else _seconds(row.cost.seconds))
                for text, row in self.sensitivity
            ]  # fmt: skip
            yield ""
            yield make_table(("on another device", "the fastest plan is", ">step"), rows)
        if self.dropped:
            yield ""
            rows = [(text, str(count)) for text, count in self.dropped[:_MOST_REASONS]]
            if more := sum(count for _, count in self.dropped[_MOST_REASONS:]):
                rows.append(("other reasons", str(more)))
            yield make_table(("dropped because", ">plans"), rows)


def name_row(row: ChoiceRow) -> str:
    """A plan in a few words: its strategy, its mesh, and its batches."""
    plan = row.plan
    mesh = plan.mesh and show_mesh(plan.mesh)
    batches = f"{row.batch_size} x {plan.accumulate}" if plan.accumulate > 1 else row.batch_size
    parts = [_named(plan.strategy), mesh or "one rank", f"batch {batches}"]
    return ", ".join(parts + ["recompute"] * bool(plan.recompute))


def _named(config: Any) -> str:
    """A config with the settings that are not at their defaults; of tuples, it shows none."""
    words: list[str] = []
    for field in attrs.fields(type(config)):
        value = getattr(config, field.name)
        if value == field.default or isinstance(value, tuple):
            continue
        if attrs.has(type(value)):
            words.append(_named(value))
        else:
            words.append(field.name if value is True else f"{field.name}={value}")
    return type(config).__name__ + (f"({', '.join(words)})" if words else "")


def _cells(row: ChoiceRow) -> tuple[str, ...]:
    cost = row.cost
    share = max(attrs.astuple(cost)) / cost.seconds
    return (
        name_row(row),
        show_bytes(row.memory),
        _seconds(cost.seconds),
        f"{row.rows_per_s:,.4g}",
        f"{cost.limit} ({share:.0%})",
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _row_data(row: ChoiceRow) -> dict[str, Any]:
    figures = {"seconds": row.cost.seconds, "rows_per_s": row.rows_per_s, "limit": row.cost.limit}
    return {**unstructure(row), **figures}
