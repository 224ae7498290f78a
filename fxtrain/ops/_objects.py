"""Objects, barriers and agreement."""

from typing import Any

import torch

from fxtrain._errors import CollectiveError
from fxtrain.ops._collect import broadcast, gather
from fxtrain.ops._pack import dump, load
from fxtrain.ops._views import known_context
from fxtrain.ops._wire import compare, exchange
from fxtrain.state import DistContext

__all__ = [
    "Opaque",
    "agree",
    "all_ranks",
    "any_rank",
    "barrier",
    "broadcast_object",
    "gather_objects",
    "raise_together",
]


class Opaque:
    """Hides an object's insides from tree walking: it travels as one leaf."""

    def __init__(self, value: Any) -> None:
        self.value = value


def gather_objects(obj: Any, ctx: DistContext) -> list[Any]:
    """Give every rank the list of all ranks' objects, in rank order.

    Args:
        obj: Anything that pickles; it may differ between ranks in every way.

    Effects:
        One exchange of packets, an all-gather too if an object is large. Objects travel as
        pickles between the ranks of this run.

    Raises:
        CollectiveError: an object does not pickle or a rank did not come; on every rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.gather_objects({"rank": ctx.rank}, ctx)
        [{'rank': 0}]
    """
    known_context("gather_objects", ctx)
    return [found.value for found in gather(Opaque(obj), ctx)]


def broadcast_object(obj: Any, ctx: DistContext, src: int = 0) -> Any:
    """Give every rank the object of one rank; what the others pass is ignored.

    Effects:
        One exchange of packets, an all-gather too if the object is large.

    Raises:
        CollectiveError: the object does not pickle or a rank did not come; on every rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.broadcast_object("run-7", ctx)
        'run-7'
    """
    known_context("broadcast_object", ctx)
    return broadcast(Opaque(obj), ctx, src=src).value


def barrier(ctx: DistContext) -> None:
    """Wait until every rank is here.

    Effects:
        One exchange of packets; none at one rank.

    Raises:
        CollectiveError: a rank is at another call or did not come; on every rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.barrier(ctx)
    """
    known_context("barrier", ctx)
    if ctx.world_size > 1:
        exchange(ctx, ("barrier", ""), torch.empty(0, dtype=torch.uint8))


def agree(value: Any, ctx: DistContext, name: str = "value") -> Any:
    """Make sure that every rank holds the same value.

    Args:
        value: Anything with a faithful `repr`, by which ranks are compared.
        name: What it is, for the message.

    Returns:
        The value.

    Effects:
        One exchange of packets; none at one rank or with `checks=False`.

    Raises:
        CollectiveError: the ranks hold different values; on every rank, with all of them.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.agree(32, ctx, name="batch size")
        32
    """
    known_context("agree", ctx)
    if ctx.world_size > 1:
        compare(ctx, ("agree", f"{name}={value!r}"))
    return value


def any_rank(flag: Any, ctx: DistContext) -> bool:
    """Whether a flag is true on at least one rank; for early stops and the like.

    Args:
        flag: A bool or one-entry tensor; a tensor on a device is waited for.

    Effects:
        One exchange of packets; none at one rank.

    Raises:
        CollectiveError: a rank is at another call or did not come; on every rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.any_rank(False, ctx)
        False
    """
    return any(_flags("any_rank", flag, ctx))


def all_ranks(flag: Any, ctx: DistContext) -> bool:
    """Whether a flag is true on every rank.

    Args:
        flag: A bool or one-entry tensor; a tensor on a device is waited for.

    Effects:
        One exchange of packets; none at one rank.

    Raises:
        CollectiveError: a rank is at another call or did not come; on every rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.all_ranks(True, ctx)
        True
    """
    return all(_flags("all_ranks", flag, ctx))


def raise_together(problem: BaseException | None, ctx: DistContext) -> None:
    """Raise on every rank if any rank has a problem, and on none otherwise.

    Args:
        problem: This rank's error, or None.

    Effects:
        One exchange of packets; none at one rank.

    Raises:
        The rank's own problem where it has one; a CollectiveError that names the ranks and
        their problems everywhere else.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.raise_together(None, ctx)
    """
    known_context("raise_together", ctx)
    if ctx.world_size > 1:
        mine = None if problem is None else f"{type(problem).__name__}: {problem}"
        call = ("raise_together", "", mine or "")
        found = [load(row)[1] for row in exchange(ctx, call, dump(mine))]
        if problem is None and any(found):
            lines = [f"  rank {rank}: {text}" for rank, text in enumerate(found) if text]
            raise CollectiveError("\n".join(["Another rank failed:", *lines]))
    if problem is not None:
        raise problem


def _flags(op: str, flag: Any, ctx: DistContext) -> list[bool]:
    known_context(op, ctx)
    if ctx.world_size == 1:
        return [bool(flag)]
    payload = torch.tensor([bool(flag)]).view(torch.uint8)
    return [bool(row[0]) for row in exchange(ctx, (op, ""), payload)]
