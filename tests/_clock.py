"""A clock for modules that read the time: it moves where they sleep, and nothing waits."""

from __future__ import annotations

from collections.abc import Callable

from fxtrain.ops.transport.pace import Pace
from fxtrain.state import DistContext

__all__ = ["Clock", "measure_anew"]


class Clock:
    """What a module finds as `time`: see the fixture `clock_of`.

    Args:
        meanwhile: What others do while a module sleeps.

    Attributes:
        now: Seconds, as every clock of it says.
        slept: The seconds of each sleep.
    """

    def __init__(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.now, self.slept, self.meanwhile = 1000.0, list[float](), meanwhile

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    perf_counter = time = monotonic

    def time_ns(self) -> int:
        """Nanoseconds."""
        return round(1e9 * self.now)

    def sleep(self, seconds: float) -> None:
        """Move the clock, and let others act."""
        self.slept.append(seconds)
        self.now += seconds
        self.meanwhile()


def measure_anew(ctx: DistContext) -> None:
    """Forget how long a rank of a pool has computed in earlier tests."""
    fresh = Pace()
    for each in (ctx, *ctx._axes.values()):
        each.comm.state.slots[Pace] = fresh
