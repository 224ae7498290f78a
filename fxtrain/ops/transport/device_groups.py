"""Collectives of tensors of a device, for which the host does not wait.

Their comparison is deferred to the next call, and made in a thread meanwhile.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from torch import distributed as dist

from fxtrain.ops.transport.exchange import CallState, settle
from fxtrain.state import DistContext

T = TypeVar("T")
_MORE_S = 5.0  # at the timeout NCCL ends the process, and the comparison reports more


def can_defer(ctx: DistContext) -> bool:
    """Whether a comparison may wait until the next call: the host does not wait for the device.

    gloo's collectives wait for the other ranks, in a call that nothing interrupts. An axis shares
    its communicator with gradients, which aborting would break.
    """
    return _has_own_group(ctx) and _library(ctx) != "gloo"


def run_on_device_group(ctx: DistContext, run: Callable[[Any], T]) -> T:
    """Run a collective over the process group for tensors of the context's device.

    Over all ranks that is a group of its own, so that values do not mix with gradients if a rank
    skips a call. Over some of them it is that of the axis, since all ranks would have to open
    another one.

    Effects:
        The first call opens the group. Every rank has made the same call by then.

    Raises:
        CollectiveError: the comparison of an earlier call shows why this one failed.
    """
    group = _device_group(ctx) if _has_own_group(ctx) else ctx.comm.group
    try:
        return run(group)
    except RuntimeError:
        settle(ctx)
        raise


def _has_own_group(ctx: DistContext) -> bool:
    comm = ctx.comm
    return comm.name == "world" and not comm.simulated and ctx.device.type != "xla"


def _library(ctx: DistContext) -> str:
    libraries = dist.get_backend_config(ctx.comm.group)
    return dict(pair.split(":") for pair in libraries.split(","))[ctx.device.type]


def _device_group(ctx: DistContext) -> Any:
    comm, state = ctx.comm, ctx.comm.slot(CallState)
    if state.device_group is None:
        # torch_xla replaces torch.distributed.new_group with one that takes fewer arguments.
        library: Any = dist.distributed_c10d
        state.device_group = library.new_group(
            list(comm.ranks),
            timeout=timedelta(seconds=comm.timeout_s + _MORE_S),
            backend=f"{ctx.device.type}:{_library(ctx)}",
            group_desc="fxtrain device",
        )
        comm.state.opened_groups.append(state.device_group)
    return state.device_group
