"""How long a placement streams: bytes over bandwidths, as values."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

import attrs

from fxtrain._record import above, record
from fxtrain.state import Placement

__all__ = ["Estimate", "Speeds", "estimate", "read_speed"]

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
    """What a placement streams in one forward, and the time that this takes.

    Args:
        placement: What is held where.
        speeds: Of disk and bus; those of a usual machine by default.

    Example:
        >>> import fxtrain as fx
        >>> unit = fx.state.PlacedUnit(name="head", device="disk", bytes=4_000_000)
        >>> placement = fx.Placement(units=(unit,), device="cpu")
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
        seconds=least * (1 if placement.ahead else 2),
    )


def read_speed(files: Iterable[str | os.PathLike[str]]) -> float | None:
    """Bytes per second at which files are read from disk; None if they hold nothing.

    Effects:
        Reads up to 256 MiB of the files, after asking the system to drop them from its cache.

    Raises:
        OSError: a file cannot be read.

    Example:
        >>> from fxtrain.big.speeds import read_speed
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
