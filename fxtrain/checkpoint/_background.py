"""Saves that are written in a thread while training goes on."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Literal

import attrs
import torch
from torch import Tensor

from fxtrain import ops
from fxtrain._errors import CheckpointError
from fxtrain.checkpoint._pieces import Piece
from fxtrain.state import DistContext

__all__ = ["Saving", "earlier", "stage", "start"]

_BUFFER, _GROUP = "checkpoint.buffer", "checkpoint.group"


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
            raise TimeoutError(f"{self.path} is still being written after {timeout_s} s.") from None
        return self.path


def earlier(ctx: DistContext, busy: Literal["wait", "skip"]) -> Saving | None:
    """Wait for the save under way, if any, or return it if this one is to be skipped.

    Raises:
        CheckpointError: it failed.
    """
    if busy not in ("wait", "skip"):
        raise CheckpointError(f"save(busy={busy!r}): choose 'wait' or 'skip'.")
    tasks = ctx.comm.ledger.tasks
    if not tasks:
        return None
    found: Saving = tasks[-1]
    if busy == "skip" and ops.any_rank(not found.done(), ctx):
        return found
    tasks.remove(found)
    found.result()
    return None


def start(ctx: DistContext, path: str, run: Callable[[DistContext], None]) -> Saving:
    """Write in a thread, over a process group of its own."""
    kept = ctx.comm.ledger.kept
    if _GROUP not in kept:
        try:
            kept[_GROUP] = ops.duplicate(ctx)
        except RuntimeError as error:  # torch's, of a rank that is gone
            raise CheckpointError(f"{path} was not saved: {error}") from error
    future: Future[None] = Future()
    saving = Saving(path=path, future=future)

    def work() -> None:
        try:
            run(kept[_GROUP])
        except BaseException as error:  # kept for whoever asks next
            future.set_exception(error)
        else:
            future.set_result(None)

    ctx.comm.ledger.tasks.append(saving)
    # Not a daemon: the interpreter waits for it at exit.
    threading.Thread(target=work, name="fxtrain save").start()
    return saving


def stage(ctx: DistContext, pieces: Sequence[Piece]) -> list[Piece]:
    """Copy pieces into one host buffer, which the next save uses again."""
    ordered = sorted(pieces, key=lambda piece: -piece.tensor.element_size())
    buffer = _buffer(ctx, sum(piece.size for piece in pieces))
    place = 0
    staged: list[Piece] = []
    for piece in ordered:
        there = buffer[place : place + piece.size].view(piece.tensor.dtype)
        there = there.view(piece.tensor.shape)
        there.copy_(piece.tensor, non_blocking=True)
        staged.append(attrs.evolve(piece, tensor=there))
        place += piece.size
    if ctx.device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(ctx.device)
    return staged


def _buffer(ctx: DistContext, size: int) -> Tensor:
    kept = ctx.comm.ledger.kept
    found = kept.get(_BUFFER)
    if found is None or found.numel() < size:
        kept.pop(_BUFFER, None)  # freed before the larger one is made
        pinned = ctx.device.type not in ("cpu", "meta", "mps")
        found = kept[_BUFFER] = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    return found
