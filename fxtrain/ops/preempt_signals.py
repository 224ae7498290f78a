"""Stopping cleanly when a scheduler preempts the job."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from fxtrain.errors import ContextError
from fxtrain.ops.objects import any_rank
from fxtrain.state import DistContext, Position
from fxtrain.state.context import check_connected

_DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR1")


@attrs.frozen(kw_only=True, eq=False)
class Preemption:
    """Whether a signal has requested that this run stops; see `preemption`.

    Attributes:
        ctx: The ranks that stop together.
        every: Updates between two checks.
    """

    ctx: DistContext = attrs.field(repr=False)
    every: int = 1
    _signalled: threading.Event = attrs.field(factory=threading.Event, init=False, repr=False)
    _agreed: threading.Event = attrs.field(factory=threading.Event, init=False, repr=False)

    @property
    def signalled(self) -> bool:
        """Whether this rank has received a signal; ranks may differ, unlike in `due`."""
        return self._signalled.is_set()

    def due(self, position: Position) -> bool:
        """Whether all ranks should save and stop now.

        Args:
            position: Of the batch just trained on, the same on every rank.

        Effects:
            One small collective every `every` updates; none inside an accumulation window, at
            one rank, or after it has returned True.

        Raises:
            CollectiveError: a rank never joins.
        """
        if self._agreed.is_set():
            return True
        if position.micro or (position.updates % self.every and not position.is_last):
            return False
        if any_rank(self._signalled.is_set(), self.ctx):
            self._agreed.set()
        return self._agreed.is_set()


@contextmanager
def preemption(
    ctx: DistContext, *, signals: Sequence[str] = _DEFAULT_SIGNALS, every: int = 1
) -> Iterator[Preemption]:
    """Catch signals, so that a run can save and stop at the end of an update.

    SLURM sends SIGUSR1 ahead of a time limit (`--signal`); most schedulers send SIGTERM before
    they kill a job. One rank that gets the signal is enough: all stop after the same update.

    Args:
        signals: Names of the signals.
        every: Updates between two checks, each of which is one small collective. Choose it so
            that `every` updates and a save fit into the scheduler's grace period.

    Effects:
        Installs handlers for these signals in this process, and restores the earlier ones at
        the end of the block.

    Raises:
        ContextError: called outside the main thread, without an open context, or a signal does not
            exist.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx, fx.ops.preemption(ctx) as notice:
        ...     notice.due(fx.Position(updates=1))
        False
    """
    check_connected("preemption", ctx)
    numbers = [_number(name) for name in signals]
    if type(every) is not int or every < 1:
        raise ContextError(
            f"preemption(every={every!r}): not a number of updates. Pass an int of 1 or more."
        )
    if threading.current_thread() is not threading.main_thread():
        raise ContextError(
            "preemption: called outside the main thread, the only one in which Python can handle "
            "signals. Call it in the main thread."
        )
    notice = Preemption(ctx=ctx, every=every)

    def record(number: int, frame: Any) -> None:
        notice._signalled.set()

    earlier = {number: signal.signal(number, record) for number in numbers}
    try:
        yield notice
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _number(name: str) -> signal.Signals:
    number = getattr(signal, str(name), None)
    if not isinstance(number, signal.Signals):
        raise ContextError(
            f"preemption(signals=...): {name!r} is not a signal on this system. "
            f"Use names such as 'SIGTERM'."
        )
    return number
