"""Putting batches on the device."""

from typing import Any

import torch
from torch import Tensor

from fxtrain import _tree
from fxtrain.state import DistContext, Plan

__all__ = ["mask", "place"]


def place(data: Any, ctx: DistContext, plan: Plan) -> Any:
    """The same data with its tensors on the context's device; everything else stays.

    Effects:
        One copy per tensor, without waiting where it comes from pinned memory; none at all on
        the CPU or with `to_device=False`, where this is the very same object.
    """
    device = ctx.device
    if device.type == "cpu" or not plan.data.to_device:
        return data
    lazily = plan.data.non_blocking

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, non_blocking=lazily and leaf.is_pinned())

    return _tree.map_leaves(move, data)


def mask(size: int, real: int, ctx: DistContext, plan: Plan) -> Tensor:
    """Which of so many rows are real, on the device of the data: padding stands at the end."""
    device = ctx.device if plan.data.to_device else torch.device("cpu")
    return (torch.arange(size) < real).to(device)
