"""Moves batches to the device."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from fxtrain import _tree
from fxtrain.ops import xla_runtime
from fxtrain.state import DistContext, Plan

__all__ = ["on_device", "valid_mask"]

S = TypeVar("S")


def on_device(
    pairs: Iterable[tuple[S, Any]], ctx: DistContext, plan: Plan, *, ahead: bool
) -> Iterator[tuple[S, Any]]:
    """Steps with their data on the context's device.

    Args:
        ahead: For an XLA device, read `plan.data.ahead` batches in advance, and move them in a
            thread.
    """
    depth = plan.data.ahead if ahead and ctx.device.type == "xla" else 0
    if not depth:
        for step, data in pairs:
            yield step, _to_device(data, ctx, plan)
        return
    waiting: deque[tuple[S, Future[Any]]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="fxtrain place") as thread:
        for step, data in pairs:
            waiting.append((step, thread.submit(_to_device, data, ctx, plan)))
            if len(waiting) > depth:
                first, sent = waiting.popleft()
                yield first, sent.result()
        for step, sent in waiting:
            yield step, sent.result()


def _to_device(data: Any, ctx: DistContext, plan: Plan) -> Any:
    """The same data with its tensors on the context's device; everything else is unchanged.

    Effects:
        One copy per tensor, non-blocking from pinned memory; none on the CPU or with
        `to_device=False`, where the result is the same object.
    """
    device = ctx.device
    if device.type == "cpu" or not plan.data.to_device:
        return data
    if device.type == "xla":
        return xla_runtime.to_device(data, ctx)
    lazily = plan.data.non_blocking

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, non_blocking=lazily and leaf.is_pinned())

    return _tree.map_leaves(move, data)


def valid_mask(size: int, real: int, ctx: DistContext, plan: Plan) -> Tensor:
    """Which rows are real, as a mask on the device of the data; padding is at the end."""
    device = ctx.device if plan.data.to_device else torch.device("cpu")
    return torch.arange(size, device=device) < real
