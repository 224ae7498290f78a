"""Background saves, written in a thread while training continues."""

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import attrs

from fxtrain import ops
from fxtrain._errors import CheckpointError
from fxtrain._exiting import exit_with
from fxtrain.checkpoint.host_copies import Staging
from fxtrain.ops.transport.exchange import release_thread
from fxtrain.state import DistContext

__all__ = ["Saving", "has_background_group", "start_background", "wait_for_earlier"]


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


@attrs.frozen(kw_only=True, eq=False)
class Saving:
    """A save, finished or in progress.

    Compared and hashed by identity.

    Attributes:
        path: Path of the checkpoint, which exists once the save is done.
    """

    path: str
    _future: "Future[None]" = attrs.field(factory=_done, alias="future", repr=False)
    _staging: Staging | None = attrs.field(default=None, alias="staging", repr=False)
    _reported: threading.Event = attrs.field(factory=threading.Event, init=False, repr=False)

    def copied(self) -> None:
        """Wait until the state is copied, so that parameters may be changed directly.

        With `background=True`, `save` returns before large parameters and optimizer states are
        copied. The next optimizer step waits for the copy. Call this before anything else that
        changes them (averaging, swapping weights, `load_model`).

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
        """Whether the save has finished or failed."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> str:
        """Wait for the checkpoint and return its path.

        Raises:
            CheckpointError: the save failed; on every rank, at each call.
            TimeoutError: the save is still in progress after `timeout_s`.
        """
        try:
            self._future.result(timeout_s)
        except TimeoutError:
            if self._future.done():  # raised by the save itself
                self._reported.set()
                raise
            raise TimeoutError(f"{self.path} is still being written after {timeout_s} s.") from None
        except BaseException:
            self._reported.set()
            atexit.unregister(self._at_exit)
            raise
        return self.path

    def _at_exit(self) -> None:
        """End the program as an uncaught exception does, if the error was never reported."""
        error = self._future.exception()
        if self._reported.is_set() or error is None:
            return
        self._reported.set()
        error.add_note(
            "This background save failed, and the program ended without checking its result. "
            "Call result() on the handle from fx.save, or fx.close(ctx)."
        )
        exit_with(error, self._at_exit)


def wait_for_earlier(ctx: DistContext, busy: Literal["wait", "skip"]) -> Saving | None:
    """Wait for a save in progress, or return it if the new save is to be skipped.

    Raises:
        CheckpointError: the earlier save failed.
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
    """Whether this rank has a group for background saves in which no rank has failed."""
    own = ctx.comm.state.save_context
    return own is not None and own.comm.state.failure is None


def start_background(
    ctx: DistContext,
    path: str,
    run: Callable[[DistContext], None],
    staging: Staging | None,
    *,
    open_group: bool,
) -> Saving:
    """Write in a thread, over a separate process group.

    Args:
        open_group: Open the group, because a rank has none or a rank in it has failed; equal on
            every rank.
    """
    state = ctx.comm.state
    if open_group or state.save_context is None:
        try:
            state.save_context = ops.duplicate(ctx)
        except RuntimeError as error:  # from torch, if a rank has exited
            raise CheckpointError(f"{path} was not saved: {error}", code="FX606") from error
    future: Future[None] = Future()
    own = state.save_context
    saving = Saving(path=path, future=future, staging=staging)

    def work() -> None:
        try:
            run(own)
        except BaseException as error:  # raised by the next `result`
            future.set_exception(error)
            # Registered last, so that it runs first. The interpreter joins this thread before
            # it runs any function of `atexit`.
            atexit.register(saving._at_exit)
        else:
            future.set_result(None)

    state.background_tasks.append(saving)
    release_thread(own)  # the previous save's thread has ended
    # Not a daemon: the interpreter waits for it at exit.
    threading.Thread(target=work, name="fxtrain save").start()
    return saving
