"""Objects, barriers and agreement."""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from fxtrain._tree import TreeSpec
from fxtrain._words import canonical_text
from fxtrain.errors import CollectiveError
from fxtrain.ops.collectives import broadcast_packed
from fxtrain.ops.transport.exchange import (
    EMPTY,
    Call,
    are_empty,
    compare_calls,
    exchange_payloads,
    same_on_all,
)
from fxtrain.ops.transport.packing import Packed
from fxtrain.ops.transport.pickled import dump, unpickle_all
from fxtrain.state import DistContext
from fxtrain.state.context import check_connected

T = TypeVar("T")
_DIGEST = 32  # bytes; fits in a packet at any world size


def gather_objects(obj: T, ctx: DistContext) -> list[T]:
    """Gather one object per rank into a list on every rank, in rank order.

    Args:
        obj: Anything that pickles; objects may differ completely between ranks.

    Effects:
        One exchange of packets, and an all-gather if an object is large. Objects are sent as
        pickles between the ranks of this run, and tensors and arrays in them as bytes, without
        gradient. Objects other than plain values, these and containers of them need a second
        exchange, in which ranks report whether they unpickled.

    Raises:
        CollectiveError: an object does not pickle, a rank cannot unpickle it, or a rank never
            joins; on every rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.gather_objects({"rank": ctx.rank}, ctx)
        [{'rank': 0}]
    """
    check_connected("gather_objects", ctx)
    return gather_given(("gather_objects", ""), obj, ctx)


def gather_given(call: Call, obj: Any, ctx: DistContext) -> list[Any]:
    """As `gather_objects`, in a call of this name; a rank with None sends no payload."""
    if ctx.world_size == 1:
        return [obj]
    blobs = exchange_payloads(ctx, call, EMPTY if obj is None else dump(obj, ctx))
    if are_empty(blobs):
        return [None] * len(blobs)
    sent = {rank: blob for rank, blob in enumerate(blobs) if blob.numel()}
    values = dict(zip(sent, unpickle_all(call[0], sent, ctx), strict=True))
    return [values.get(rank) for rank in range(len(blobs))]


def broadcast_object(obj: T, ctx: DistContext, src: int = 0) -> T:
    """Send the object of one rank to every rank; the objects of other ranks are ignored.

    Effects:
        As `gather_objects`.

    Raises:
        CollectiveError: the object does not pickle, a rank cannot unpickle it, or a rank never
            joins; on every rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.broadcast_object("run-7", ctx)
        'run-7'
    """
    check_connected("broadcast_object", ctx)
    return broadcast_packed("broadcast_object", _as_leaf(obj), ctx, src)


def _as_leaf(obj: Any) -> Packed:
    """Any object, packed as one leaf."""
    return Packed(shape=TreeSpec("*"), tensors={}, others={0: obj}, back={})


def barrier(ctx: DistContext) -> None:
    """Wait until every rank has called `barrier`.

    Effects:
        One exchange of packets; none at one rank.

    Raises:
        CollectiveError: a rank makes another call or never joins; on every rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.barrier(ctx)
    """
    check_connected("barrier", ctx)
    exchange_payloads(ctx, ("barrier", ""), EMPTY)


def agree(
    value: T,
    ctx: DistContext,
    name: str = "value",
    *,
    explain: Callable[[], Exception] | None = None,
) -> T:
    """Check that every rank has the same value.

    Args:
        value: Any value: tensors and arrays are compared by their bytes, records and
            containers by their parts, other objects by their pickled state.
        name: Name of the value in the error message.
        explain: Called on every rank if the ranks have different values; returns the error to
            raise. It may gather what that shows. By default, a CollectiveError shows the values.

    Returns:
        The value.

    Effects:
        One exchange of packets; none at one rank or with `checks=False`.

    Raises:
        CollectiveError: the ranks have different values; on every rank, with all values.
        Exception: what `explain` returns, in place of that.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.agree(32, ctx, name="batch size")
        32
    """
    check_connected("agree", ctx)
    if ctx.world_size == 1:
        return value
    if explain is None:
        compare_calls(ctx, ("agree", f"{name}={canonical_text(value)}"))
    elif ctx.comm.checks and ctx.comm.control is not None:
        digest = hashlib.blake2b(canonical_text(value).encode(), digest_size=_DIGEST).digest()
        if not same_on_all(ctx, (name, ""), digest):
            raise explain()
    return value


def any_rank(flag: object, ctx: DistContext) -> bool:
    """Whether a flag is true on at least one rank, for example to stop early.

    Args:
        flag: A bool or one-entry tensor; reading a device tensor waits for the device.

    Effects:
        One exchange of packets; none at one rank.

    Raises:
        CollectiveError: a flag is neither true nor false, or a rank makes another call or never
            joins; on every rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.any_rank(False, ctx)
        False
    """
    return any(_flags("any_rank", flag, ctx, usual=False))


def all_ranks(flag: object, ctx: DistContext) -> bool:
    """Whether a flag is true on every rank.

    Args:
        flag: A bool or one-entry tensor; reading a device tensor waits for the device.

    Effects:
        One exchange of packets; none at one rank.

    Raises:
        CollectiveError: a flag is neither true nor false, or a rank makes another call or never
            joins; on every rank.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.all_ranks(True, ctx)
        True
    """
    return all(_flags("all_ranks", flag, ctx, usual=True))


def _flags(op: str, flag: object, ctx: DistContext, *, usual: bool) -> list[bool]:
    """The flags of all ranks; those that are as `usual` take no payload."""
    check_connected(op, ctx)
    local, unclear = False, None
    try:
        local = bool(flag)
    except Exception as error:  # a tensor of several entries, or an error of the flag's __bool__
        unclear = error
    payload = EMPTY
    if unclear is not None or local is not usual:
        payload = torch.tensor([unclear is not None], device="cpu").view(torch.uint8)
    rows = exchange_payloads(ctx, (op, ""), payload)
    if are_empty(rows):
        return [usual]  # of all ranks
    if wrong := [str(rank) for rank, row in enumerate(rows) if row.numel() and row.item()]:
        raise CollectiveError(
            f"{op}: the flag of rank {', '.join(wrong)} is neither true nor false. Pass a bool "
            f"or a tensor with one entry."
        ) from unclear
    return [usual is not bool(row.numel()) for row in rows]
