"""Libraries that find their place among the ranks in the environment or in torch's group."""

import atexit
import os

from torch import distributed as dist

from fxtrain.state import DistContext

__all__ = ["ensure_group", "export_local_rank"]


def export_local_rank(ctx: DistContext) -> None:
    """Say in the environment which device of its node this rank uses.

    DeepSpeed looks it up while it trains, so it has to stay; `detect` ignores it by itself.

    Effects:
        Sets LOCAL_RANK.
    """
    device = ctx.device.index
    os.environ["LOCAL_RANK"] = str(ctx.local_rank if device is None else device)


def ensure_group(ctx: DistContext) -> None:
    """Open torch's process group where a context of one rank went without.

    Effects:
        A group of one rank until the process ends. There is no store that others could reach;
        gloo listens at the address of the machine's name, or of GLOO_SOCKET_IFNAME.
    """
    if dist.is_initialized():
        return
    library = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl", "npu": "hccl"}[ctx.device.type]
    dist.init_process_group(library, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_close)


def _close() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
