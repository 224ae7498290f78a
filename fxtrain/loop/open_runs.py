"""Runs of `fit` that are left open: they end when their context closes, or with the script."""

import atexit
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any

from fxtrain._exiting import exit_with
from fxtrain.state import CommState, DistContext, Report

__all__ = ["body_failed", "ended_with"]


def ended_with(ctx: DistContext, reports: Generator[Report]) -> Generator[Report]:
    """Close an iterator, which saves its run, before the context closes and before the script ends.

    A `for` statement closes an iterator that nothing else refers to. One that has a name is still
    open after `break`; Python would close it after it has taken modules apart.
    """
    state = ctx.comm.state
    state.open_runs.add(reports)
    # Before the functions of `atexit`, which close trackers and groups, and while threads start.
    # Also used by `concurrent.futures`; there is no public function, and none that undoes it.
    threads: Any = threading
    threads._register_atexit(_end, weakref.ref(state), os.getpid())
    registered = threads._threading_atexits
    weakref.finalize(reports, registered.remove, registered[-1]).atexit = False
    return reports


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


def _end(found: weakref.ref[CommState], process: int) -> None:
    state = found()
    if state is None or os.getpid() != process:  # a worker of a loader, which was forked
        return
    try:
        if (failure := getattr(sys, "last_value", None)) is not None:
            raise failure  # which the runs see as the reason why they end
    except BaseException:
        errors = state.end_runs()
    else:
        errors = state.end_runs()
    for error in errors:
        atexit.register(_failing(error))  # last, so it runs first


def _failing(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        exit_with(error, fail)

    return fail
