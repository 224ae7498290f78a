"""The iterator that `fit` returns."""

import atexit
import contextlib
import functools
import gc
import inspect
import sys
import weakref
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Any

from fxtrain._reading import StrPath
from fxtrain.ops.logs import log
from fxtrain.state import DistContext, Report


class _ScriptEnded(BaseException):
    """The script ended, and its run is still open."""


class Reports(Iterator[Report]):
    """The reports of a run; closing it ends the run, and saves it.

    A `for` statement closes an iterator that nothing else refers to. One with a name is closed by
    its `with` block, or with its context. One that the end of the script finds open is not saved:
    groups are closing then, and no thread starts any more.
    """

    def __init__(self, ctx: DistContext, reports: Generator[Report], path: StrPath) -> None:
        self._ctx, self._reports, self._path = ctx, reports, path
        ctx.comm.state.open_runs.add(self)
        at_exit = functools.partial(_abandon, weakref.ref(self))
        atexit.register(at_exit)
        weakref.finalize(self, atexit.unregister, at_exit).atexit = False

    def __next__(self) -> Report:
        return next(self._reports)

    def __enter__(self) -> "Reports":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the run after its update, and save it; nothing if it has ended, or is in a step."""
        if inspect.getgeneratorstate(self._reports) != inspect.GEN_RUNNING:
            self._reports.close()

    def abandon(self) -> None:
        """End the run as it is, at the end of the script."""
        if inspect.getgeneratorstate(self._reports) == inspect.GEN_SUSPENDED:
            log(self._ctx).warning(
                "fit: the run in %s is still open at the end of the script, so what it trained "
                "since its last checkpoint is not saved. Use `with fx.fit(...) as reports:`.",
                self._path,
            )
            with contextlib.suppress(_ScriptEnded):
                self._reports.throw(_ScriptEnded())


def _abandon(reference: weakref.ref[Reports]) -> None:
    if (reports := reference()) is not None:
        reports.abandon()


def body_failed(closing: GeneratorExit, handled: BaseException | None) -> bool:
    """Whether the body of a loop ended with an error, not by `break`; called by its iterator.

    Python closes an iterator in both cases and does not say why. An error that unwinds the frame
    of the loop has a traceback that stands where the frame does.

    Args:
        closing: What the iterator received.
        handled: The error that was being handled where the loop began, if any.
    """
    if closing.__context__ not in (None, handled):  # closed by a `with` block, or at the end
        return True
    frame: Any = sys._getframe(2)
    return any(
        type(one) is TracebackType and one.tb_lasti == frame.f_lasti
        for one in gc.get_referrers(frame)
    )
