"""Background saves: the state is copied to host memory, and written in a thread."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import attrs
from torch import Tensor

from fxtrain import ops
from fxtrain._host_memory import pinned_buffer
from fxtrain.checkpoint.write_plan import TensorChunk
from fxtrain.errors import CheckpointError
from fxtrain.ops.devices import synchronize
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


@attrs.frozen(kw_only=True, eq=False)
class Saving:
    """A save, finished or in progress.

    Attributes:
        path: Path of the checkpoint, which exists once the save is done.
    """

    path: str
    _future: "Future[None]" = attrs.field(factory=_done, alias="future", repr=False)

    def done(self) -> bool:
        """Whether the save has finished or failed."""
        return self._future.done()

    def result(self, timeout_s: float | None = None) -> str:
        """Wait for the checkpoint and return its path.

        Raises:
            CheckpointError: the save failed; on every rank, at each call.
            TimeoutError: the save is still in progress after `timeout_s`.
        """
        self._future.result(timeout_s)
        return self.path


def wait_for_earlier(ctx: DistContext) -> None:
    """Wait for a save in progress.

    Raises:
        CheckpointError: it failed.
    """
    if tasks := ctx.comm.state.background_tasks:
        tasks.pop().result()


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

    def work() -> None:
        try:
            run(group)
        except BaseException as error:  # raised by `result`, which a program may never call
            _LOG.error("A background save failed: %s", error)
            future.set_exception(error)
        else:
            future.set_result(None)

    saving = Saving(path=path, future=future)
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
