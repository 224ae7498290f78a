"""Runs of `fit` that are left open: they end when their context closes, or with the script."""

import atexit
import functools
import os
import threading
import weakref
from collections.abc import Callable, Generator

from fxtrain._exiting import exit_with
from fxtrain.state import CommState, DistContext, Report

__all__ = ["ended_with"]


def ended_with(ctx: DistContext, reports: Generator[Report]) -> Generator[Report]:
    """Close an iterator, which saves its run, before the context closes and before the script ends.

    A `for` statement closes an iterator that nothing else refers to. One that has a name is still
    open after `break`; Python would close it after it has taken modules apart.
    """
    state = ctx.comm.state
    state.open_runs.add(reports)
    # Before the functions of `atexit`, which close trackers and groups, and while threads start.
    # Also used by `concurrent.futures`; there is no public function.
    threading._register_atexit(functools.partial(_end, weakref.ref(state), os.getpid()))  # pyright: ignore[reportAttributeAccessIssue]
    return reports


def _end(found: weakref.ref[CommState], process: int) -> None:
    state = found()
    if state is None or os.getpid() != process:  # a worker of a loader, which was forked
        return
    for error in state.end_runs():
        atexit.register(_failing(error))  # last, so it runs first


def _failing(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        exit_with(error, fail)

    return fail
