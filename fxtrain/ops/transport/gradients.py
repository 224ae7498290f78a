"""Gradients through a gather: each rank gets those of its own rows, summed over the ranks."""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from fxtrain._errors import CollectiveError
from fxtrain.state import DistContext

# torch 2.13 renamed this function, and warns about the older name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def check_gradients(ctx: DistContext) -> None:
    """Check that gradients can be sent between the ranks of a context.

    Raises:
        CollectiveError: torch_xla, whose collectives are not torch's, connects them.
    """
    if ctx.world_size > 1 and ctx.device.type == "xla":
        raise CollectiveError(
            "gather(grad=True) is not supported on xla. Call torch_xla's all_gather, which is "
            "differentiable, in the loss."
        )


def with_gradient(own: Tensor, whole: Tensor, ctx: DistContext) -> Tensor:
    """The rows of all ranks, differentiable with respect to those of this rank.

    Args:
        own: What this rank has passed to the gather, (r, ...) or 0-d.
        whole: What the gather has returned, (world size · r, ...).

    Effects:
        Backward sends one reduce-scatter over the ranks.
    """
    return _Gathered.apply(own, _Rows(whole, ctx))


class _Rows:
    """Arguments that autograd does not look into, so that the rows are not copied."""

    def __init__(self, whole: Tensor, ctx: DistContext) -> None:
        self.whole = whole
        self.ctx = ctx


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(state: Any, own: Tensor, rows: _Rows) -> Tensor:  # type: ignore[override]
        state.ctx, state.shape = rows.ctx, own.shape
        return rows.whole

    @staticmethod
    @once_differentiable
    def backward(state: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx: DistContext = state.ctx
        if ctx.world_size == 1:
            return grad.reshape(state.shape), None
        mine = grad.new_empty(state.shape)
        group = ctx.comm.control if grad.is_cpu else ctx.comm.group
        _reduce_scatter(mine.view(-1), grad.reshape(-1), group=group)
        return mine, None
