"""Who runs what: running things on one rank first, or on one only; speaking."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fxtrain._errors import CollectiveError
from fxtrain.ops.objects import gather_objects
from fxtrain.ops.same_errors import gather_errors
from fxtrain.ops.transport.mismatches import check_is_context
from fxtrain.ops.transport.pickled import error_text
from fxtrain.state import DistContext

__all__ = ["main_first", "on_main", "on_rank", "say"]

T = TypeVar("T")


@contextmanager
def main_first(ctx: DistContext) -> Iterator[None]:
    """Let rank 0 run the block before the others, as for a download that all share.

    Collectives of this context do not belong in the block, since rank 0 runs it alone. Blocks
    may be nested; the outermost one decides the order.

    Effects:
        Two exchanges of packets; none at one rank. The others wait for rank 0, and then rank 0
        for them, as long as the context's `timeout_s`.

    Raises:
        CollectiveError: another rank failed inside the block, with its error; at once, on every
            rank that did not fail itself. One that fails raises its own error.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     with fx.ops.main_first(ctx):
        ...         rows = list(range(3))
    """
    check_is_context("main_first", ctx)
    state = ctx.comm.state
    if ctx.world_size == 1 or state.in_main_first:
        yield
        return
    if not ctx.is_main:
        _release_others(None, ctx)
    state.in_main_first = True
    calls = state.call_count
    problem: BaseException | None = None
    try:
        yield
    except BaseException as error:
        # A collective in the block met one of main_first, which the others know by now.
        if state.call_count != calls or state.failure is not None:
            raise
        problem = error
    finally:
        state.in_main_first = False
    if ctx.is_main:
        _release_others(problem, ctx)
    if problem is None or not ctx.is_main:  # the others left when rank 0 failed
        _release_others(problem, ctx)
    if problem is not None:
        raise problem


def _release_others(problem: BaseException | None, ctx: DistContext) -> None:
    """Tell the other ranks that this one is done with the block, or why it failed."""
    found = gather_errors("main_first", "" if problem is None else error_text(problem), ctx)
    failed = [
        f"rank {rank} failed inside the block: {text}" for rank, text in enumerate(found) if text
    ]
    if failed and problem is None:
        raise CollectiveError("\n".join([f"main_first: {failed[0]}", *failed[1:]]))


def on_main(fn: Callable[[], T], ctx: DistContext) -> T | None:
    """Call a function on rank 0 only; the others get None at once.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.on_main(lambda: "written", ctx)
        'written'
    """
    return on_rank(fn, ctx, rank=0)


def on_rank(fn: Callable[[], T], ctx: DistContext, *, rank: int) -> T | None:
    """Call a function on one rank only; the others get None at once.

    Args:
        rank: The rank; negative counts from the last.

    Raises:
        CollectiveError: there is no such rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.on_rank(lambda: ctx.rank, ctx, rank=-1)
        0
    """
    check_is_context("on_rank", ctx)
    if not -ctx.world_size <= rank < ctx.world_size:
        raise CollectiveError(f"on_rank(rank={rank}): this context has {ctx.world_size} ranks.")
    return fn() if ctx.rank == rank % ctx.world_size else None


def say(text: Any, ctx: DistContext, *, everyone: bool = False) -> None:
    """Write a line to standard output, once.

    Args:
        everyone: Write every rank's line instead, in rank order, each behind its rank.

    Effects:
        One exchange of packets with `everyone`, none otherwise.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.say("epoch 1", ctx)
        epoch 1
    """
    check_is_context("say", ctx)
    lines = [str(text)]
    if everyone:
        found = gather_objects(str(text), ctx)
        lines = [f"[{rank}] {line}" for rank, line in enumerate(found)]
    if ctx.is_main:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
