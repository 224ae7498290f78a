"""Saves that are written in a thread while training goes on."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal

import attrs

from fxtrain import ops
from fxtrain._errors import CheckpointError
from fxtrain.checkpoint._staging import Staging
from fxtrain.state import DistContext

__all__ = ["Saving", "earlier", "has_way", "start"]

_GROUP = "checkpoint.group"


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
    if found._staging is not None:
        found._staging.let_go()
    found.result()
    return None


def has_way(ctx: DistContext) -> bool:
    """Whether this rank has a group for saves in the background on which no rank was lost."""
    group = ctx.comm.ledger.kept.get(_GROUP)
    return group is not None and group.comm.ledger.broken is None


def start(
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
    kept = ctx.comm.ledger.kept
    if anew:
        try:
            kept[_GROUP] = ops.duplicate(ctx)
        except RuntimeError as error:  # torch's, of a rank that is gone
            raise CheckpointError(f"{path} was not saved: {error}") from error
    future: Future[None] = Future()
    saving = Saving(path=path, future=future, staging=staging)

    def work() -> None:
        try:
            run(kept[_GROUP])
        except BaseException as error:  # kept for whoever asks next
            future.set_exception(error)
        else:
            future.set_result(None)

    ctx.comm.ledger.tasks.append(saving)
    kept[_GROUP].comm.ledger.owner = None  # the thread of the save before has made its last call
    # Not a daemon: the interpreter waits for it at exit.
    threading.Thread(target=work, name="fxtrain save").start()
    return saving
