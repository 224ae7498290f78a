"""Saves that are written in a thread while training goes on."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import attrs

from fxtrain import ops
from fxtrain._errors import CheckpointError
from fxtrain.checkpoint.host_copies import Staging
from fxtrain.state import DistContext

__all__ = ["Saving", "has_background_group", "start_background", "wait_for_earlier"]


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


@attrs.frozen(kw_only=True, eq=False)
class Saving:
    """A save, finished or under way.

    Identity decides equality and hash.

    Attributes:
        path: Where the checkpoint is, or will be.
    """

    path: str
    _future: "Future[None]" = attrs.field(factory=_done, alias="future", repr=False)
    _staging: Staging | None = attrs.field(default=None, alias="staging", repr=False)
    _heard: threading.Event = attrs.field(factory=threading.Event, init=False, repr=False)

    def copied(self) -> None:
        """Wait until the state is copied, so that parameters may be changed by hand.

        A save in the background copies large parameters and optimizer states after it has
        returned. The next step of the optimizer waits for that; anything else that changes
        them (averaging, swapping in other weights, `load_model`) calls this first.

        Example:
            >>> import fxtrain as fx, tempfile, torch
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
            ...     saving = fx.save(tempfile.mkdtemp(), ctx, model, background=True)
            ...     saving.copied()
            ...     _ = model.module.weight.data.zero_()
        """
        if self._staging is not None:
            self._staging.settle()

    def done(self) -> bool:
        """Whether the checkpoint is there, or has failed."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> str:
        """Wait for the checkpoint and return its path.

        Raises:
            CheckpointError: it failed; on every rank, at each call.
            TimeoutError: it is not there within `timeout_s`.
        """
        try:
            self._future.result(timeout_s)
        except TimeoutError:
            if self._future.done():  # the save's own
                self._heard.set()
                raise
            raise TimeoutError(f"{self.path} is still being written after {timeout_s} s.") from None
        except BaseException:
            self._heard.set()
            atexit.unregister(self._at_exit)
            raise
        return self.path

    def _at_exit(self) -> None:
        """End the program as an error that nobody catches does, if nobody has heard of it.

        Python gives no other way to change the exit code once the script has ended: what
        functions of `atexit` raise is printed and forgotten. So the others run from here,
        which closes process groups and trackers, and then the process ends.
        """
        error = self._future.exception()
        if self._heard.is_set() or error is None:
            return
        self._heard.set()
        error.add_note(
            "The save ran in the background, and the program ended without asking how it went: "
            "call result() on what fx.save returned, or fx.close(ctx)."
        )
        # Of a script that failed itself, a launcher keeps what the hook was told first.
        failed = getattr(sys, "last_value", None) is not None
        try:
            (sys.__excepthook__ if failed else sys.excepthook)(
                type(error), error, error.__traceback__
            )
            atexit.unregister(self._at_exit)
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(1)


def wait_for_earlier(ctx: DistContext, busy: Literal["wait", "skip"]) -> Saving | None:
    """Wait for the save under way, if any, or return it if this one is to be skipped.

    Raises:
        CheckpointError: it failed.
    """
    tasks = ctx.comm.state.background_tasks
    if not tasks:
        return None
    found: Saving = tasks[-1]
    if busy == "skip" and ops.any_rank(not found.done(), ctx):
        return found
    tasks.remove(found)
    if found._staging is not None:
        found._staging.release()
    found.result()
    return None


def has_background_group(ctx: DistContext) -> bool:
    """Whether this rank has a group for saves in the background on which no rank was lost."""
    own = ctx.comm.state.save_context
    return own is not None and own.comm.state.failure is None


def start_background(
    ctx: DistContext,
    path: str,
    run: Callable[[DistContext], None],
    staging: Staging | None,
    *,
    anew: bool,
) -> Saving:
    """Write in a thread, over a process group of its own.

    Args:
        anew: Open the group, since a rank has none, or a rank was lost on it; equal on every
            rank.
    """
    state = ctx.comm.state
    if anew or state.save_context is None:
        try:
            state.save_context = ops.duplicate(ctx)
        except RuntimeError as error:  # torch's, of a rank that is gone
            raise CheckpointError(f"{path} was not saved: {error}") from error
    future: Future[None] = Future()
    own = state.save_context
    saving = Saving(path=path, future=future, staging=staging)

    def work() -> None:
        try:
            run(own)
        except BaseException as error:  # kept for whoever asks next
            future.set_exception(error)
            # As late as can be, to run before what was registered earlier. The interpreter
            # joins this thread before it runs any of them.
            atexit.register(saving._at_exit)
        else:
            future.set_result(None)

    state.background_tasks.append(saving)
    own.comm.state.thread = None  # the thread of the save before has made its last call
    # Not a daemon: the interpreter waits for it at exit.
    threading.Thread(target=work, name="fxtrain save").start()
    return saving
