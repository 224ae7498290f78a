"""A second way to the same ranks."""

from datetime import timedelta
from typing import Any, cast

import attrs
import torch
from torch import distributed as dist

from fxtrain.ops.transport.exchange import rank_loss_guard, wait_pending_check
from fxtrain.ops.transport.mismatches import check_is_context
from fxtrain.ops.transport.packets import packets_of
from fxtrain.state import Comm, CommState, DistContext

__all__ = ["duplicate"]


def duplicate(ctx: DistContext) -> DistContext:
    """The same ranks over a group of their own, so that another thread can talk too.

    Calls on one context are ordered, so only the thread that opened it may make them: two
    threads would mix up each other's values. The copy is that of the thread that first uses
    it; make one for each thread, and hand each to the same thread on every rank.

    Effects:
        Opens a gloo group, which every rank must do at the same place, and returns once all of
        them have connected. The group closes with the context.

    Raises:
        CollectiveError: a rank never joined.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.duplicate(ctx).world_size
        1
    """
    check_is_context("duplicate", ctx)
    comm, fresh = ctx.comm, CommState(thread=None)
    comm.state.children.add(fresh)
    if ctx.world_size == 1 or comm.simulated:
        return attrs.evolve(ctx, comm=attrs.evolve(comm, close=Comm().close, state=fresh))
    wait_pending_check(ctx)
    # Equal on every rank, which have made as many calls and opened as many groups.
    name = f"{comm.name}+{comm.state.call_count}.{len(comm.state.opened_groups)}"
    with rank_loss_guard(ctx, ("duplicate", "")):
        group = _open(ctx)
        _connected(ctx, name)
    copy = attrs.evolve(
        comm, group=group, control=group, name=name, close=Comm().close, state=fresh
    )
    packets_of(copy, ctx.rank)
    return attrs.evolve(ctx, comm=copy, device=torch.device("cpu"))


def _open(ctx: DistContext) -> dist.ProcessGroup:
    comm, world = ctx.comm, cast(dist.ProcessGroup, dist.group.WORLD)
    group: Any = dist.new_group(
        list(comm.ranks),
        timeout=timedelta(seconds=comm.timeout_s),
        backend="gloo",
        # A group of some ranks is named after them and the number of open groups, so that the
        # next one may get the name of one that is closed and find its addresses in the store.
        use_local_synchronization=ctx.world_size < world.size(),
        group_desc="fxtrain duplicate",
    )
    comm.state.opened_groups.append(group)
    return group


def _connected(ctx: DistContext, name: str) -> None:
    """Wait for every rank: one that closes its group early would break those still connecting.

    The key may be that of an earlier context, so that its arrivals are counted in rounds.
    """
    store, key = ctx.comm.store, f"{name}/connected"
    arrived = store.add(key, 1)
    if arrived % ctx.world_size == 0:
        store.set(f"{key}/{arrived}", "")
    last = -(-arrived // ctx.world_size) * ctx.world_size
    store.wait([f"{key}/{last}"], timedelta(seconds=ctx.comm.timeout_s))
