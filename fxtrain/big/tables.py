"""A placement as a table."""

import itertools

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxtrain._byte_units import show_bytes
from fxtrain._errors import escape_unprintable
from fxtrain.big.budgets import Budget
from fxtrain.big.speeds import Speeds, estimate
from fxtrain.state import PlacedUnit, Placement

__all__ = ["table"]


def table(
    placement: Placement, *, budget: Budget | None = None, speeds: Speeds | None = None
) -> RenderableType:
    """A placement to print with rich: what is where, and what a forward reads.

    Units in a row that are on one device share a line.

    Args:
        placement: What is held where.
        budget: What devices allow, to show beside what is used.
        speeds: Of disk and bus, to show the time that a forward takes at least.

    Example:
        >>> import fxtrain as fx
        >>> from rich.console import Console
        >>> units = tuple(
        ...     fx.state.PlacedUnit(name=f"layers.{index}", device="disk", bytes=10_000_000)
        ...     for index in range(3)
        ... )
        >>> console = Console(width=70)
        >>> with console.capture() as shown:
        ...     console.print(fx.big.table(fx.Placement(units=units)))
        >>> [line.split() for line in shown.get().splitlines() if "layers" in line]
        [['layers.0', 'to', 'layers.2', '3', 'disk', '30.0', 'MB']]
    """
    return Group(_units(placement), _devices(placement, budget), _reading(placement, speeds))


def _units(placement: Placement) -> Table:
    grid = Table("units", box=box.SIMPLE_HEAD, pad_edge=False)
    grid.add_column("count", justify="right")
    grid.add_column("held on")
    grid.add_column("size", justify="right")
    for device, group in itertools.groupby(placement.units, lambda unit: unit.device):
        units = list(group)
        grid.add_row(
            _plain(_names(units)), str(len(units)), _plain(device),
            show_bytes(sum(unit.bytes for unit in units)),
        )  # fmt: skip
    return grid


def _names(units: list[PlacedUnit]) -> str:
    first, last = (unit.name or "the model" for unit in (units[0], units[-1]))
    return first if len(units) == 1 else f"{first} to {last}"


def _devices(placement: Placement, budget: Budget | None) -> Table:
    grid = Table("device", box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ["weights", "streamed units", "free for the rest", "total"]
    for name in columns + (["allowed"] if budget else []):
        grid.add_column(name, justify="right")
    for device in placement.devices:
        total = placement.bytes_on(device)
        weights = sum(unit.bytes for unit in placement.units if unit.device == device)
        passing = placement.room if device == placement.device else 0
        passing += placement.staging if device == "cpu" else 0
        row = [weights, passing, total - weights - passing, total]
        cells = [show_bytes(max(size, 0)) for size in row]
        if budget:
            allowed = budget.allowed(device)
            cells.append("any" if allowed is None else show_bytes(allowed))
        grid.add_row(_plain(device), *cells)
    return grid


def _reading(placement: Placement, speeds: Speeds | None) -> Text:
    found = estimate(placement, speeds)
    if not placement.streamed:
        return _plain("Nothing streams: every unit computes where it is held.")
    tiers = [
        f"{show_bytes(size)} from {name}"
        for name, size in (("disk", found.disk_bytes), ("the CPU", found.cpu_bytes))
        if size
    ]
    text = f"A forward reads {' and '.join(tiers) or 'nothing'}"
    if speeds is None:
        return _plain(f"{text}.")
    return _plain(
        f"{text}: at least {found.least_s:.3g} s per token at batch 1, at {speeds.disk / 1e9:.2g} "
        f"GB/s from disk and {speeds.bus / 1e9:.3g} GB/s over the bus."
    )


def _plain(text: str) -> Text:
    """Text that may come from a file, without markup or control characters."""
    return Text(escape_unprintable(text))
