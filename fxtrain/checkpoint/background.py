"""Background saves: the state is copied to host memory, and written in a thread."""

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

import attrs
import torch
from torch import Tensor

from fxtrain import ops
from fxtrain._host_memory import pinned_buffer
from fxtrain.checkpoint.write_plan import TensorChunk
from fxtrain.errors import CheckpointError
from fxtrain.ops.transport.exchange import release_thread
from fxtrain.state import DistContext

_LOG = logging.getLogger(__name__)


@attrs.define(kw_only=True, eq=False)
class CheckpointState:
    """What saves and restores keep about a communicator, as its `slot`.

    Attributes:
        background: The ranks over a separate group, for background saves.
        buffer: Host memory to which saves copy tensors, uint8, reused by the next save.
        restored_from: The checkpoint of the last restore, which no save may prune.
    """

    background: DistContext | None = None
    buffer: Tensor | None = attrs.field(default=None, repr=False)
    restored_from: str | None = None


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


@attrs.define(kw_only=True, eq=False)
class Saving:
    """A save, finished or in progress.

    Attributes:
        path: Path of the checkpoint, which exists once the save is done.
    """

    path: str
    _future: "Future[None]" = attrs.field(factory=_done, alias="future", repr=False)
    _reported: bool = attrs.field(default=False, init=False, repr=False)

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
                self._reported = True
                raise
            raise TimeoutError(f"{self.path} is still being written after {timeout_s} s.") from None
        except BaseException:
            self._reported = True
            atexit.unregister(self._at_exit)
            raise
        return self.path

    def _at_exit(self) -> None:
        """End the program as an uncaught exception does, if the error was never reported."""
        error = self._future.exception()
        if self._reported or error is None:
            return
        self._reported = True
        error.add_note(
            "This background save failed, and the program ended without checking its result. "
            "Call result() on the handle from fx.save, or fx.close(ctx)."
        )
        _exit_with(error, self._at_exit)


def _exit_with(error: BaseException, caller: Callable[[], object]) -> None:
    """End the program as an uncaught exception does.

    Once the script has ended, Python has no other way to change the exit code: it prints and
    discards what functions of `atexit` raise. The remaining functions therefore run from here,
    which closes process groups and trackers, and then the process exits.

    Args:
        error: What failed.
        caller: The function of `atexit` that calls this one.
    """
    # If the script itself failed, a launcher keeps the first error that the hook received.
    failed = getattr(sys, "last_value", None) is not None
    try:
        (sys.__excepthook__ if failed else sys.excepthook)(type(error), error, error.__traceback__)
        atexit.unregister(caller)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(1)


def wait_for_earlier(ctx: DistContext, busy: Literal["wait", "skip"]) -> Saving | None:
    """Wait for a save in progress, or return it if the new save is to be skipped.

    Raises:
        CheckpointError: the earlier save failed.
    """
    tasks = ctx.comm.state.background_tasks
    if not tasks:
        return None
    earlier: Saving = tasks[-1]
    if busy == "skip" and ops.any_rank(not earlier.done(), ctx):
        return earlier
    tasks.remove(earlier)
    earlier.result()
    return None


def has_background_group(ctx: DistContext) -> bool:
    """Whether this rank has a group for background saves in which no rank has failed."""
    group = ctx.comm.slot(CheckpointState).background
    return group is not None and group.comm.state.failure is None


def start_background(
    ctx: DistContext, path: str, run: Callable[[DistContext], None], *, open_group: bool
) -> Saving:
    """Write in a thread, over a separate process group.

    Args:
        open_group: Open the group, because a rank has none or a rank in it has failed; equal on
            every rank.
    """
    state = ctx.comm.slot(CheckpointState)
    if open_group or state.background is None:
        try:
            state.background = ops.duplicate(ctx)
        except RuntimeError as error:  # from torch, if a rank has exited
            raise CheckpointError(f"{path} was not saved: {error}", code="FX606") from error
    future: Future[None] = Future()
    group = state.background
    saving = Saving(path=path, future=future)

    def work() -> None:
        try:
            run(group)
        except BaseException as error:  # raised by the next `result`
            future.set_exception(error)
            # Registered last, so that it runs first. The interpreter joins this thread before
            # it runs any function of `atexit`.
            atexit.register(saving._at_exit)
        else:
            future.set_result(None)

    ctx.comm.state.background_tasks.append(saving)
    release_thread(group)  # the previous save's thread has ended
    # Not a daemon: the interpreter waits for it at exit.
    threading.Thread(target=work, name="fxtrain save").start()
    return saving


def stage(ctx: DistContext, chunks: Sequence[TensorChunk]) -> list[TensorChunk]:
    """Copy chunks into one host buffer, which later saves reuse; pinned for accelerators."""
    ordered = sorted(chunks, key=lambda chunk: -chunk.tensor.element_size())  # keeps views aligned
    buffer = _buffer(ctx, sum(chunk.tensor.nbytes for chunk in chunks))
    offset = 0
    staged: list[TensorChunk] = []
    for chunk in ordered:
        copy = buffer[offset : offset + chunk.tensor.nbytes].view(chunk.tensor.dtype)
        copy = copy.view(chunk.tensor.shape)
        copy.copy_(chunk.tensor, non_blocking=True)
        staged.append(attrs.evolve(chunk, tensor=copy))
        offset += chunk.tensor.nbytes
    if _accelerated(ctx):
        torch.accelerator.synchronize(ctx.device)
    return staged


def _buffer(ctx: DistContext, size: int) -> Tensor:
    state = ctx.comm.slot(CheckpointState)
    if state.buffer is None or state.buffer.numel() < size:
        state.buffer = None  # freed before the larger one is made
        state.buffer, refused = pinned_buffer(size, ctx.device.type if _accelerated(ctx) else "cpu")
        if refused:
            _LOG.warning(
                "save(background=True): %d MiB of host memory could not be pinned (%s), so copying "
                "the state takes longer. Raise the limit of locked memory (ulimit -l).",
                size >> 20,
                refused,
            )
    return state.buffer


def _accelerated(ctx: DistContext) -> bool:
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == ctx.device.type
