"""Who runs what: splitting work, running things on one rank first, speaking."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from fxtrain._errors import CollectiveError, DataError
from fxtrain.ops._objects import broadcast_object, gather_objects
from fxtrain.ops._views import known_context
from fxtrain.state import DistContext

__all__ = ["main_first", "on_main", "on_rank", "say", "split"]

T = TypeVar("T")


def split(value: Any, ctx: DistContext, *, pad: bool = False) -> Any:
    """This rank's share of a sequence, in order; the first ranks get one more.

    Args:
        value: A sequence or tensor (split along its first dimension), or a dict of them of
            equal length.
        pad: Repeat the last item until all shares are equally long.

    Returns:
        A new value of the same type; the input is not changed.

    Raises:
        DataError: the value cannot be split, or the entries of a dict differ in length.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.split(["a", "b", "c"], ctx)
        ['a', 'b', 'c']
    """
    known_context("split", ctx)
    if isinstance(value, Mapping):
        lengths = {key: len(entry) for key, entry in value.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"split: the entries of the dict have different lengths: {lengths}.")
        return {key: split(entry, ctx, pad=pad) for key, entry in value.items()}
    if not isinstance(value, Sequence | torch.Tensor) or isinstance(value, str | bytes):
        raise DataError(
            f"split takes a list, tuple, tensor or dict of them, found {type(value).__name__}."
        )
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        raise DataError("split: a 0-d tensor has no rows to share out.")
    share, extra = divmod(len(value), ctx.world_size)
    start = ctx.rank * share + min(ctx.rank, extra)
    stop = start + share + (ctx.rank < extra)
    missing = share + (extra > 0) - (stop - start) if pad and len(value) else 0
    if isinstance(value, torch.Tensor):
        return torch.cat([value[start:stop], *[value[-1:]] * missing])
    mine: Any = value[start:stop]
    return mine + type(mine)([value[-1]] * missing) if missing else mine[:]


@contextmanager
def main_first(ctx: DistContext) -> Iterator[None]:
    """Let rank 0 run the block before the others, as for a download that all share.

    Effects:
        Two exchanges of packets; none at one rank. The others wait as long as the
        context's `timeout_s`.

    Raises:
        CollectiveError: rank 0 failed inside the block, with its error; rank 0 raises its own.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     with fx.ops.main_first(ctx):
        ...         rows = list(range(3))
    """
    known_context("main_first", ctx)
    if not ctx.is_main:
        failed = broadcast_object(None, ctx)
        if failed is not None:
            raise CollectiveError(f"main_first: rank 0 failed inside the block: {failed}")
        yield
        return
    try:
        yield
    except BaseException as error:
        broadcast_object(f"{type(error).__name__}: {error}", ctx)
        raise
    broadcast_object(None, ctx)


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
    known_context("on_rank", ctx)
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
    known_context("say", ctx)
    lines = [str(text)]
    if everyone:
        found = gather_objects(str(text), ctx)
        lines = [f"[{rank}] {line}" for rank, line in enumerate(found)]
    if ctx.is_main:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
