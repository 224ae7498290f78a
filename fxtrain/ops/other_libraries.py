"""Support for libraries that read their rank from the environment or from torch's group."""

import atexit
import os

from torch import distributed as dist

from fxtrain.state import DistContext


def export_local_rank(ctx: DistContext) -> None:
    """Export the index of this rank's device on its node.

    DeepSpeed reads the variable while it trains, so it stays set; `detect` ignores it if it is
    set without the others.

    Effects:
        Sets LOCAL_RANK.
    """
    device = ctx.device.index
    os.environ["LOCAL_RANK"] = str(ctx.local_rank if device is None else device)


def ensure_group(ctx: DistContext) -> None:
    """Open torch's process group for a context of one rank, which has none.

    Effects:
        A group of one rank until the process ends. Its store is not reachable from outside;
        gloo listens at the address of the host name, or on GLOO_SOCKET_IFNAME.
    """
    if dist.is_initialized():
        return
    library = dist.get_default_backend_for_device(ctx.device)
    dist.init_process_group(library, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_close)


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
