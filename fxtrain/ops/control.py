"""Running code on one rank first or on one rank only, printing once, and stopping at a signal."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs

from fxtrain.errors import CollectiveError, ContextError
from fxtrain.ops.objects import any_rank, gather_objects
from fxtrain.ops.same_errors import fail_together
from fxtrain.ops.transport.exchange import CallState
from fxtrain.state import DistContext, Position
from fxtrain.state.context import check_connected

T = TypeVar("T")
_DEFAULT_SIGNALS = ("SIGTERM", "SIGUSR1")


@contextmanager
def main_first(ctx: DistContext) -> Iterator[None]:
    """Run the block on rank 0 before the other ranks, for example to download shared files.

    The block must not call collectives of this context, since only rank 0 runs it at first.
    Blocks may be nested; the outermost one decides the order.

    Effects:
        Two exchanges of packets; none at one rank. The other ranks wait for rank 0, then rank 0
        waits for them, each for up to the context's `timeout_s`.

    Raises:
        Exception: the block failed on a rank; on every rank, as in `fail_together`.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     with fx.ops.main_first(ctx):
        ...         rows = list(range(3))
    """
    check_connected("main_first", ctx)
    state = ctx.comm.slot(CallState)
    if ctx.world_size == 1 or state.in_main_first:
        yield
        return
    if not ctx.is_main:
        with fail_together(ctx):  # until rank 0 has run the block
            pass
    state.in_main_first = True
    try:
        with fail_together(ctx):
            yield
    finally:
        state.in_main_first = False
    if ctx.is_main:
        with fail_together(ctx):  # until the others have
            pass


def on_main(fn: Callable[[], T], ctx: DistContext) -> T | None:
    """Call a function on rank 0 only; the other ranks return None without waiting.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.on_main(lambda: "written", ctx)
        'written'
    """
    return on_rank(fn, ctx, rank=0)


def on_rank(fn: Callable[[], T], ctx: DistContext, *, rank: int) -> T | None:
    """Call a function on one rank only; the other ranks return None without waiting.

    Args:
        rank: The rank; a negative one counts from the end.

    Raises:
        CollectiveError: the context has no such rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.on_rank(lambda: ctx.rank, ctx, rank=-1)
        0
    """
    check_connected("on_rank", ctx)
    if not -ctx.world_size <= rank < ctx.world_size:
        raise CollectiveError(
            f"on_rank(rank={rank}): no such rank. This context has ranks 0 to {ctx.world_size - 1}."
        )
    return fn() if ctx.rank == rank % ctx.world_size else None


def say(text: object, ctx: DistContext, *, everyone: bool = False) -> None:
    """Write a line to standard output, on rank 0 only.

    Args:
        everyone: Write every rank's line, in rank order, each prefixed with its rank.

    Effects:
        One exchange of packets with `everyone`, none otherwise.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.say("epoch 1", ctx)
        epoch 1
    """
    check_connected("say", ctx)
    lines = [str(text)]
    if everyone:
        texts = gather_objects(str(text), ctx)
        lines = [f"[{rank}] {line}" for rank, line in enumerate(texts)]
    if ctx.is_main:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


@attrs.define(kw_only=True, eq=False)
class Preemption:
    """Whether a signal has requested that this run stops; see `preemption`.

    Attributes:
        ctx: The ranks that stop together.
        every: Updates between two checks.
        signaled: Whether this rank has received a signal; ranks may differ, unlike in `due`.
    """

    ctx: DistContext = attrs.field(repr=False, on_setattr=attrs.setters.frozen)
    every: int = attrs.field(default=1, on_setattr=attrs.setters.frozen)
    signaled: bool = attrs.field(default=False, init=False)
    _agreed: bool = attrs.field(default=False, init=False, repr=False)

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
        if self._agreed:
            return True
        if position.micro or (position.updates % self.every and not position.is_last):
            return False
        self._agreed = any_rank(self.signaled, self.ctx)
        return self._agreed


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
            "signals. Call it in the main thread; elsewhere, use fx.fit(..., signals=())."
        )
    notice = Preemption(ctx=ctx, every=every)

    def record(number: int, frame: Any) -> None:
        notice.signaled = True

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
