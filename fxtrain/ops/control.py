"""Running code on one rank first or on one rank only, and printing once."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from fxtrain.errors import CollectiveError
from fxtrain.ops.objects import gather_objects
from fxtrain.ops.transport.exchange import CallState, exchange_texts
from fxtrain.ops.transport.mismatches import check_is_context
from fxtrain.ops.transport.pickled import error_text
from fxtrain.state import DistContext

T = TypeVar("T")


@contextmanager
def main_first(ctx: DistContext) -> Iterator[None]:
    """Run the block on rank 0 before the other ranks, for example to download shared files.

    The block must not call collectives of this context, since only rank 0 runs it at first.
    Blocks may be nested; the outermost one decides the order.

    Effects:
        Two exchanges of packets; none at one rank. The other ranks wait for rank 0, then rank 0
        waits for them, each for up to the context's `timeout_s`.

    Raises:
        CollectiveError: another rank failed inside the block, with its error; on every rank that
            did not fail. A rank that fails raises its own error.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     with fx.ops.main_first(ctx):
        ...         rows = list(range(3))
    """
    check_is_context("main_first", ctx)
    state = ctx.comm.slot(CallState)
    if ctx.world_size == 1 or state.in_main_first:
        yield
        return
    if not ctx.is_main:
        _release_others(None, ctx)
    state.in_main_first = True
    calls = state.count
    problem: BaseException | None = None
    try:
        yield
    except BaseException as error:
        # A collective inside the block was compared with main_first: every rank has raised.
        if state.count != calls or ctx.comm.state.failure is not None:
            raise
        problem = error
    finally:
        state.in_main_first = False
    if ctx.is_main:
        _release_others(problem, ctx)
    if problem is None or not ctx.is_main:  # if rank 0 failed, the others have raised already
        _release_others(problem, ctx)
    if problem is not None:
        raise problem


def _release_others(problem: BaseException | None, ctx: DistContext) -> None:
    """Report to the other ranks that this one has finished the block, or why it failed."""
    mine = "" if problem is None else error_text(problem)
    found = exchange_texts(ctx, ("main_first", "", mine), mine)
    failed = [
        f"rank {rank} failed inside the block: {text}" for rank, text in enumerate(found) if text
    ]
    if failed and problem is None:
        raise CollectiveError("\n".join([f"main_first: {failed[0]}", *failed[1:]]), code="FX303")


def on_main(fn: Callable[[], T], ctx: DistContext) -> T | None:
    """Call a function on rank 0 only; the other ranks return None without waiting.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.on_main(lambda: "written", ctx)
        'written'
    """
    return on_rank(fn, ctx, rank=0)


def on_rank(fn: Callable[[], T], ctx: DistContext, *, rank: int) -> T | None:
    """Call a function on one rank only; the other ranks return None without waiting.

    Args:
        rank: The rank; a negative one counts from the end.

    Raises:
        CollectiveError: the context has no such rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.on_rank(lambda: ctx.rank, ctx, rank=-1)
        0
    """
    check_is_context("on_rank", ctx)
    if not -ctx.world_size <= rank < ctx.world_size:
        raise CollectiveError(
            f"on_rank(rank={rank}): no such rank. This context has ranks 0 to {ctx.world_size - 1}."
        )
    return fn() if ctx.rank == rank % ctx.world_size else None


def say(text: object, ctx: DistContext, *, everyone: bool = False) -> None:
    """Write a line to standard output, on rank 0 only.

    Args:
        everyone: Write every rank's line, in rank order, each prefixed with its rank.

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
