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
from torch import Tensor

from fxtrain import ops
from fxtrain.checkpoint.write_plan import TensorChunk
from fxtrain.errors import CheckpointError
from fxtrain.ops.devices import synchronize
from fxtrain.ops.pinned_buffers import pinned_buffer
from fxtrain.ops.safetensors_header import aligned_order
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


def finished(size: int = 0) -> "Future[int]":
    """The result of a save that is over: the bytes that it has written."""
    future: Future[int] = Future()
    future.set_result(size)
    return future


@attrs.frozen(kw_only=True, eq=False)
class Saving:
    """A save, finished or in progress.

    Attributes:
        path: Path of the checkpoint, which exists once the save is done.
    """

    path: str
    _future: "Future[int]" = attrs.field(factory=finished, alias="future", repr=False)
    _reported: threading.Event = attrs.field(factory=threading.Event, init=False, repr=False)

    def done(self) -> bool:
        """Whether the save has finished or failed."""
        return self._future.done()

    @property
    def size(self) -> int | None:
        """Bytes of the files of all ranks; None until they are written."""
        failed = not self.done() or self._future.exception() is not None
        return None if failed else self._future.result()

    def result(self, timeout_s: float | None = None) -> str:
        """Wait for the checkpoint and return its path.

        Raises:
            CheckpointError: the save failed; on every rank, at each call.
            TimeoutError: the save is still in progress after `timeout_s`.
        """
        try:
            self._future.result(timeout_s)
        finally:
            if self._future.done():  # its error was seen
                self._reported.set()
                atexit.unregister(self._at_exit)
        return self.path

    def finish(self) -> None:
        """Wait, and raise the error of the save unless `result` has raised it before."""
        if not self._reported.is_set():
            self.result()

    def _at_exit(self) -> None:
        """End the program as an uncaught exception does, since the error was never reported.

        Once the script has ended, Python has no other way to change the exit code: it prints and
        discards what functions of `atexit` raise. The remaining functions therefore run from here,
        which closes process groups and trackers, and then the process exits.
        """
        error = self._future.exception()
        assert error is not None  # else this is not registered
        error.add_note(
            "This background save failed, and the program ended without checking its result. "
            "Call result() on the handle from fx.save, or fx.close(ctx)."
        )
        # If the script itself failed, a launcher keeps the first error that the hook received.
        failed = getattr(sys, "last_value", None) is not None
        show = sys.__excepthook__ if failed else sys.excepthook
        try:
            show(type(error), error, error.__traceback__)
            atexit.unregister(self._at_exit)
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(1)


def in_progress(ctx: DistContext, busy: Literal["wait", "skip"]) -> Saving | None:
    """The earlier save, if a rank still writes it and the new one is to be skipped."""
    tasks = ctx.comm.state.background_tasks
    skips = tasks and busy == "skip" and ops.any_rank(not tasks[-1].done(), ctx)
    return tasks[-1] if skips else None


def wait_for_earlier(ctx: DistContext) -> None:
    """Wait for a save in progress; raises its error, which some ranks may have seen before."""
    tasks = ctx.comm.state.background_tasks
    while tasks:
        tasks.pop().finish()


def start_background(
    ctx: DistContext, path: str, run: Callable[[DistContext], int], *, open_group: bool
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
    future: Future[int] = Future()
    group = state.background
    saving = Saving(path=path, future=future)

    def work() -> None:
        try:
            size = run(group)
        except BaseException as error:  # raised by the next `result`
            future.set_exception(error)
            # Registered last, so that it runs first. The interpreter joins this thread before
            # it runs any function of `atexit`.
            atexit.register(saving._at_exit)
        else:
            future.set_result(size)

    ctx.comm.state.background_tasks.append(saving)
    release_thread(group)  # the previous save's thread has ended
    # Not a daemon: the interpreter waits for it at exit.
    threading.Thread(target=work, name="fxtrain save").start()
    return saving


def stage(ctx: DistContext, chunks: Sequence[TensorChunk]) -> list[TensorChunk]:
    """Copy chunks into one host buffer, which later saves reuse; pinned for accelerators."""
    # Copying to an address in the middle of a cache line takes a third longer.
    sizes = [chunk.tensor.nbytes for chunk in chunks]
    buffer = _buffer(ctx, sum(sizes))
    offset = 0
    staged: list[TensorChunk] = []
    for chunk in [chunks[number] for number in aligned_order(sizes)]:
        copy = buffer[offset : offset + chunk.tensor.nbytes].view(chunk.tensor.dtype)
        copy = copy.view(chunk.tensor.shape)
        copy.copy_(chunk.tensor, non_blocking=True)
        staged.append(attrs.evolve(chunk, tensor=copy))
        offset += chunk.tensor.nbytes
    synchronize(ctx)
    return staged


def _buffer(ctx: DistContext, size: int) -> Tensor:
    state = ctx.comm.slot(CheckpointState)
    if state.buffer is None or state.buffer.numel() < size:
        state.buffer = None  # freed before the larger one is made
        kind = "cpu" if ctx.device.type in ("meta", "xla") else ctx.device.type
        state.buffer, refused = pinned_buffer(size, kind)
        if refused:
            _LOG.warning("save(background=True) is slower, as memory is not pinned: %s", refused)
    return state.buffer
