"""A second context over the same ranks."""

from datetime import timedelta
from typing import Any, cast

import attrs
import torch
from torch import distributed as dist

from fxtrain.ops.transport.exchange import CallState, rank_loss_guard, settle
from fxtrain.ops.transport.member_groups import open_by_members
from fxtrain.ops.transport.mismatches import check_is_context
from fxtrain.state import Comm, CommState, DistContext


def duplicate(ctx: DistContext) -> DistContext:
    """Make a context over the same ranks with a separate group, for another thread.

    Collectives are matched by their order, so only the thread that opened a context may use it.
    A duplicate belongs to the thread that first uses it. Make one per thread, and pass each to
    the corresponding thread on every rank.

    Effects:
        Opens a gloo group and returns once every rank has connected; every rank must call it at
        the same point. The group closes with the context.

    Raises:
        CollectiveError: a rank never joined.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.duplicate(ctx).world_size
        1
    """
    check_is_context("duplicate", ctx)
    comm, fresh = ctx.comm, CommState()
    comm.state.children.add(fresh)
    if ctx.world_size == 1 or comm.simulated:
        return attrs.evolve(ctx, comm=attrs.evolve(comm, close=Comm().close, state=fresh))
    settle(ctx)
    # Equal on every rank, since all have made the same calls and opened the same groups.
    name = f"{comm.name}+{comm.slot(CallState).count}.{len(comm.state.opened_groups)}"
    with rank_loss_guard(ctx, ("duplicate", "")):
        group = _open(ctx)
        _connected(ctx, name)
    copy = attrs.evolve(
        comm, group=group, control=group, name=name, close=Comm().close, state=fresh
    )
    return attrs.evolve(ctx, comm=copy, device=torch.device("cpu"))


def _open(ctx: DistContext) -> dist.ProcessGroup:
    comm, world = ctx.comm, cast(dist.ProcessGroup, dist.group.WORLD)
    new_group = open_by_members if ctx.world_size < world.size() else dist.new_group
    group: Any = new_group(
        list(comm.ranks),
        timeout=timedelta(seconds=comm.timeout_s),
        backend="gloo",
        group_desc="fxtrain duplicate",
    )
    comm.state.opened_groups.append(group)
    return group


def _connected(ctx: DistContext, name: str) -> None:
    """Wait for every rank: closing a group early would break ranks that still connect.

    An earlier context may have used the key, so arrivals are counted in rounds.
    """
    store, key = ctx.comm.store, f"{name}/connected"
    arrived = store.add(key, 1)
    if arrived % ctx.world_size == 0:
        store.set(f"{key}/{arrived}", "")
    last = -(-arrived // ctx.world_size) * ctx.world_size
    store.wait([f"{key}/{last}"], timedelta(seconds=ctx.comm.timeout_s))
