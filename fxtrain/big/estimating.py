"""How many bytes a forward of a placement reads, how long it takes, and tables of placements."""

import itertools
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs
from rich.console import Group, RenderableType
from rich.text import Text

from fxtrain._display import show_bytes
from fxtrain._drawing import make_table, plain_text
from fxtrain.state import Placement, Unit

_DISK_SPEED, _BUS_SPEED = 2e9, 25e9  # bytes per second, of a usual machine
_SAMPLE = 256 << 20  # bytes
_CHUNK = 8 << 20


@attrs.frozen(kw_only=True)
class Estimate:
    """What a placement streams in one forward.

    Attributes:
        disk_bytes: Read from disk.
        cpu_bytes: Read from the CPU's memory by an accelerator.
        least_s: Seconds that this takes at least, and so does a forward.
    """

    disk_bytes: int
    cpu_bytes: int
    least_s: float


def estimate(placement: Placement, disk_speed: float | None = None) -> Estimate:
    """The bytes that a placement streams in one forward, and the time that this takes.

    Args:
        placement: Where each unit is held.
        disk_speed: Bytes per second that `read_speed` measured; 2 GB/s by default. The bus is
            assumed to have 25 GB/s.

    Example:
        >>> import fxtrain as fx
        >>> unit = fx.state.Unit(name="head", device="disk", bytes=4_000_000)
        >>> fx.big.estimate(fx.state.Placement(units=(unit,), device="cpu")).least_s
        0.002
    """
    streamed = {"cpu": 0, "disk": 0}
    for unit in placement.streamed:
        streamed[unit.device] += unit.bytes - unit.buffers
    return Estimate(
        disk_bytes=streamed["disk"],
        cpu_bytes=streamed["cpu"],
        least_s=seconds_of(streamed["cpu"], streamed["disk"], disk_speed),
    )


def seconds_of(cpu_bytes: int, disk_bytes: int, disk_speed: float | None = None) -> float:
    """Seconds in which units stream: reading a file and copying to an accelerator overlap."""
    return disk_bytes / min(disk_speed or _DISK_SPEED, _BUS_SPEED) + cpu_bytes / _BUS_SPEED


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
    placement: Placement,
    *,
    budget: Mapping[str, int] | None = None,
    disk_speed: float | None = None,
) -> RenderableType:
    """A placement to print with rich: where units are held, and what a forward reads.

    Units in a row that are on one device share a line.

    Args:
        placement: Where each unit is held.
        budget: Bytes that devices allow, to show beside those that are used.
        disk_speed: As for `estimate`.

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
    reading = _reading(placement, disk_speed)
    return Group(_units(placement), "", _devices(placement, budget), "", reading)


def _units(placement: Placement) -> RenderableType:
    rows: list[tuple[str, ...]] = []
    for device, group in itertools.groupby(placement.units, lambda unit: unit.device):
        units = list(group)
        size = show_bytes(sum(unit.bytes for unit in units))
        rows.append((_names(units), str(len(units)), device, size))
    return make_table(("units", ">count", "held on", ">size"), rows)


def _names(units: list[Unit]) -> str:
    first, last = (unit.name or "the model" for unit in (units[0], units[-1]))
    return first if len(units) == 1 else f"{first} to {last}"


def _devices(placement: Placement, budget: Mapping[str, int] | None) -> RenderableType:
    rows: list[list[str]] = []
    for device in placement.devices:
        total = placement.bytes_on(device)
        weights = sum(unit.bytes for unit in placement.units if unit.device == device)
        passing = placement.room if device == placement.device else 0
        passing += placement.staging if device == "cpu" else 0
        sizes = [weights, passing, total - weights - passing, total]
        cells = [show_bytes(max(size, 0)) for size in sizes]
        if budget:
            allowed = budget.get(device)
            cells.append("any" if allowed is None else show_bytes(allowed))
        rows.append([device, *cells])
    columns = ["device", ">weights", ">streamed units", ">free for the rest", ">total"]
    return make_table([*columns, *([">allowed"] if budget else [])], rows)


def _reading(placement: Placement, disk_speed: float | None) -> Text:
    reading = estimate(placement, disk_speed)
    if not placement.streamed:
        return plain_text("Nothing streams: every unit computes where it is held.")
    tiers = [
        f"{show_bytes(size)} from {name}"
        for name, size in (("disk", reading.disk_bytes), ("the CPU", reading.cpu_bytes))
        if size
    ]
    speeds = f"{(disk_speed or _DISK_SPEED) / 1e9:.2g} GB/s from disk"
    return plain_text(
        f"A forward reads {' and '.join(tiers) or 'nothing'}: at least {reading.least_s:.3g} s per "
        f"token at batch 1, at {speeds} and {_BUS_SPEED / 1e9:.3g} GB/s over the bus."
    )
