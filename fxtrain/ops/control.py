"""Running code on one rank first or on one rank only, printing once, and logging with the rank."""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, TypeVar

from fxtrain._record import shown
from fxtrain.errors import CollectiveError, ContextError
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
    problems = exchange_texts(ctx, ("main_first", "", mine), mine)
    failed = [
        f"rank {rank} failed inside the block: {text}" for rank, text in enumerate(problems) if text
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
        texts = gather_objects(str(text), ctx)
        lines = [f"[{rank}] {line}" for rank, line in enumerate(texts)]
    if ctx.is_main:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()


class RankLogger(logging.LoggerAdapter[logging.Logger]):
    """A standard library logger that logs on rank 0 by default.

    Every call takes two more keywords: `everyone=True` logs on all ranks, each line prefixed
    with its rank; `rank=3` logs on that rank only.
    """

    def __init__(self, logger: logging.Logger, ctx: DistContext) -> None:
        super().__init__(logger, {})
        self._ctx = ctx

    def log(  # the keywords of `logging.Logger.log`, and two more
        self,
        level: int,
        msg: object,
        *args: Any,
        everyone: bool = False,
        rank: int = 0,
        exc_info: Any = None,
        stack_info: bool = False,
        stacklevel: int = 1,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Log on the chosen ranks; the others return without formatting the message."""
        if (everyone or self._ctx.rank == rank) and self.isEnabledFor(level):
            text = f"[rank {self._ctx.rank}] {msg}" if everyone or rank else msg
            self.logger.log(
                level,
                text,
                *args,
                exc_info=exc_info,
                stack_info=stack_info,
                stacklevel=stacklevel + 1,
                extra=extra,
            )

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message and keywords unchanged."""
        return msg, kwargs


def log(ctx: DistContext, name: str = "fxtrain.run") -> RankLogger:
    """A logger for this rank, which logs on rank 0 unless a call asks for other ranks.

    Args:
        ctx: The context of this process.
        name: Name of the underlying standard library logger; you configure its handlers and
            level. While it has no handler, records from INFO up, or from the level that you set,
            go to standard error.

    Raises:
        ContextError: the first argument is not a context, or the name is not a string.

    Example:
        >>> import fxtrain as fx, logging
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.log(ctx).warning("loss %.1f", 0.25, everyone=True)
    """
    if not isinstance(ctx, DistContext):
        raise ContextError(
            f"log takes a context, found {shown(ctx)}. For example: "
            f"fx.ops.log(ctx).info('loss %.3f', report.loss)."
        )
    if not isinstance(name, str):
        raise ContextError(f"log(ctx, name={shown(name)}): pass the name of a logger, a string.")
    logger = logging.getLogger(name)
    return RankLogger(logger if logger.hasHandlers() else _to_stderr(logger), ctx)


def _to_stderr(logger: logging.Logger) -> logging.Logger:
    """A logger of its own in place of one that nobody has set up."""
    plain = logging.Logger(logger.name, _level_of(logger))
    plain.addHandler(logging.StreamHandler())
    return plain


def _level_of(logger: logging.Logger) -> int:
    """The level that was set for a logger or one above it, but for the root; INFO by default."""
    if logger.parent is None:
        return logging.INFO
    return logger.level or _level_of(logger.parent)
