"""Buffers that training changes, such as running statistics: rank 0's are sent to all replicas."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fxtrain.backends.core import step_functions
from fxtrain.ops.transport.exchange import rank_loss_guard
from fxtrain.state import UpdateResult, UpdateSpec, Wrapped


def apply(model: Wrapped, update: UpdateSpec) -> UpdateResult:
    """An update on torch's own machinery; before it, replicas get the same buffers."""
    send_buffers(model)
    return step_functions.apply(model, update)


def send_buffers(model: Wrapped) -> None:
    """Send the first replica's buffers to all, in place; independent replicas keep their own.

    Buffers that no state_dict contains are skipped: forward only reads them.

    Effects:
        One broadcast per dtype of the buffers, if there are any and several ranks.
    """
    replica = model.status.replica
    ranks = model.ctx.axis("loss") if replica is None else replica.within
    if ranks.world_size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for buffer in _buffers_of(model.module):
        by_dtype.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_dtype.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        with rank_loss_guard(ranks, ("step", "buffers")):
            dist.broadcast(flat, group=ranks.comm.group, group_src=0)
        if ranks.rank:
            parts = flat.split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.shape))


def _buffers_of(module: nn.Module) -> Iterator[Tensor]:
    seen: set[int] = set()
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is None or name in part._non_persistent_buffers_set:
                continue
            if id(buffer) not in seen and not hasattr(buffer, "device_mesh"):
                seen.add(id(buffer))
                yield buffer.detach()
