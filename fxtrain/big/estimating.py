"""How many bytes a forward of a placement reads, how long it takes, and tables of placements."""

import itertools
import os
import time
from collections.abc import Iterable
from pathlib import Path

import attrs
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fxtrain._display import show_bytes
from fxtrain._record import above, record
from fxtrain.big.budgets import Budget
from fxtrain.errors import escape_unprintable
from fxtrain.state import Placement, Unit

_SAMPLE = 256 << 20  # bytes
_CHUNK = 8 << 20


@record
class Speeds:
    """Bytes per second at which units stream.

    Attributes:
        disk: Of files on disk.
        bus: From the CPU's memory to an accelerator, or between accelerators.
    """

    disk: float = attrs.field(default=2e9, validator=above(0))
    bus: float = attrs.field(default=25e9, validator=above(0))


@attrs.frozen(kw_only=True)
class Estimate:
    """What a placement streams in one forward.

    Attributes:
        disk_bytes: Read from disk.
        cpu_bytes: Read from the CPU's memory by an accelerator.
        least_s: Seconds that this takes at least, and so does a forward.
        seconds: The same, doubled if units are not read ahead, since a device then waits for
            each unit in turn.
    """

    disk_bytes: int
    cpu_bytes: int
    least_s: float
    seconds: float


def estimate(placement: Placement, speeds: Speeds | None = None) -> Estimate:
    """The bytes that a placement streams in one forward, and the time that this takes.

    Args:
        placement: Where each unit is held.
        speeds: Of disk and bus; those of a usual machine by default.

    Example:
        >>> import fxtrain as fx
        >>> unit = fx.state.Unit(name="head", device="disk", bytes=4_000_000)
        >>> placement = fx.state.Placement(units=(unit,), device="cpu")
        >>> fx.big.estimate(placement, fx.big.Speeds(disk=1e9)).least_s
        0.004
    """
    speeds = speeds or Speeds()
    streamed = {"cpu": 0, "disk": 0}
    for unit in placement.streamed:
        streamed[unit.device] += unit.bytes - unit.buffers
    # Reading a file and copying to an accelerator overlap: the slower of the two counts.
    least = streamed["disk"] / min(speeds.disk, speeds.bus) + streamed["cpu"] / speeds.bus
    return Estimate(
        disk_bytes=streamed["disk"],
        cpu_bytes=streamed["cpu"],
        least_s=least,
        seconds=least * (1 if placement.prefetch else 2),
    )


def read_speed(files: Iterable[str | os.PathLike[str]]) -> float | None:
    """Bytes per second at which files are read from disk; None if they hold nothing.

    Effects:
        Reads up to 256 MiB of the files, after asking the system to drop them from its cache.

    Raises:
        OSError: a file cannot be read.

    Example:
        >>> from fxtrain.big import read_speed
        >>> read_speed([]) is None
        True
    """
    buffer = bytearray(_CHUNK)
    count, start = 0, time.perf_counter()
    for path in files:
        handle = os.open(Path(path), os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            while count < _SAMPLE and (got := os.readv(handle, [buffer])):
                count += got
        finally:
            os.close(handle)
    return count / max(time.perf_counter() - start, 1e-9) if count else None


def table(
    placement: Placement, *, budget: Budget | None = None, speeds: Speeds | None = None
) -> RenderableType:
    """A placement to print with rich: where units are held, and what a forward reads.

    Units in a row that are on one device share a line.

    Args:
        placement: Where each unit is held.
        budget: Bytes that devices allow, to show beside those that are used.
        speeds: Of disk and bus, to show the time that a forward takes at least.

    Example:
        >>> import fxtrain as fx
        >>> from rich.console import Console
        >>> units = tuple(
        ...     fx.state.Unit(name=f"layers.{index}", device="disk", bytes=10_000_000)
        ...     for index in range(3)
        ... )
        >>> console = Console(width=70)
        >>> with console.capture() as shown:
        ...     console.print(fx.big.table(fx.state.Placement(units=units)))
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


def _names(units: list[Unit]) -> str:
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
    reading = estimate(placement, speeds)
    if not placement.streamed:
        return _plain("Nothing streams: every unit computes where it is held.")
    tiers = [
        f"{show_bytes(size)} from {name}"
        for name, size in (("disk", reading.disk_bytes), ("the CPU", reading.cpu_bytes))
        if size
    ]
    text = f"A forward reads {' and '.join(tiers) or 'nothing'}"
    if speeds is None:
        return _plain(f"{text}.")
    return _plain(
        f"{text}: at least {reading.least_s:.3g} s per token at batch 1, at "
        f"{speeds.disk / 1e9:.2g} GB/s from disk and {speeds.bus / 1e9:.3g} GB/s over the bus."
    )


def _plain(text: str) -> Text:
    """Text that may come from a file, without markup or control characters."""
    return Text(escape_unprintable(text))
