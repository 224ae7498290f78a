"""Process groups for a block that may fail on some ranks, after which no group is in step."""

import contextlib
import secrets
import traceback
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from fxtrain.ops.closing import abort_groups, interrupt
from fxtrain.ops.failure_watch import FailureWatch
from fxtrain.ops.objects import barrier, gather_objects
from fxtrain.ops.transport.exchange import CallState
from fxtrain.state import Comm, DistContext

_PATIENCE_S = 5.0
_DESC = "fxtrain separate"


@contextlib.contextmanager
def separate_groups(ctx: DistContext) -> Iterator[None]:
    """Give a context other process groups for tensors in a block that may fail on some ranks.

    The ranks have then started different collectives, so that later ones in the same group would
    mix up values, and the device of a rank may wait for one that another rank never starts. Groups
    of the block are given up at its end. Control traffic keeps its group, in which ranks read each
    other's packets whatever they call.

    Effects:
        Two exchanges of packets, and a group for each communicator of the context and its axes. A
        rank on which the block raises reports it through the store, and the others abort the
        groups of the block. The block ends when the device has completed its kernels. Nothing at
        one rank, in a dry run and under XLA.
    """
    if ctx.world_size == 1 or ctx.comm.simulated or ctx.device.type == "xla":
        yield
        return
    calls, opened = ctx.comm.slot(CallState), ctx.comm.state.opened_groups
    key, groups = _open(ctx)
    before, kept = len(opened), {comm: (comm.group, comm.state.failure) for comm in groups}
    device_group, calls.device_group = calls.device_group, None
    for comm, group in groups.items():
        comm.group = group

    def block_groups() -> list[Any]:
        return [*groups.values(), *opened[before:]]

    watch = FailureWatch(ctx.comm.store, key, lambda _: interrupt(block_groups()))
    watch.start()
    try:
        yield
        if ctx.device.type != "cpu":
            torch.accelerator.synchronize(ctx.device)
    except Exception as error:
        watch.report(f"{type(error).__name__}: {error}")
        traceback.clear_frames(error.__traceback__)  # whose variables hold groups
        raise
    finally:
        watch.stop()
        for comm, (group, failure) in kept.items():
            comm.group = group
            comm.state.failure = failure  # a collective of the block that failed breaks no other
        calls.device_group = device_group
        late, opened[before:] = block_groups(), []
        # No rank waits for another one here, as `destroy_process_group` does under NCCL.
        abort_groups(late, min(_PATIENCE_S, ctx.comm.timeout_s))


def _open(ctx: DistContext) -> tuple[str, dict[Comm, Any]]:
    """A key in the store that no other block has, and a group for each communicator."""
    axes = {"world": ctx, **ctx._axes}
    own = {name: axis.comm.ranks for name, axis in axes.items()}
    rows = gather_objects((secrets.token_hex(8), own), ctx)
    # torch_xla replaces torch.distributed.new_group with one that takes fewer arguments.
    library: Any = dist.distributed_c10d
    backend = dist.get_backend_config(ctx.comm.group)
    wait = timedelta(seconds=ctx.comm.timeout_s)
    groups: dict[Comm, Any] = {}
    known: dict[tuple[tuple[int, ...], ...], Any] = {}
    for name, axis in axes.items():
        parts = tuple(sorted({ranks[name] for _, ranks in rows}))
        if parts not in known:  # every rank opens the groups of all
            opened = [
                library.new_group(list(part), timeout=wait, backend=backend, group_desc=_DESC)
                for part in parts
                if len(part) > 1
            ]
            members = [group for group in opened if group is not dist.GroupMember.NON_GROUP_MEMBER]
            known[parts] = members[0] if members else None
        if axis.comm.group is not None:
            groups[axis.comm] = known[parts]
    # gloo: a rank that gives up its groups at once would break others that still connect.
    barrier(ctx)
    return rows[0][0], groups
