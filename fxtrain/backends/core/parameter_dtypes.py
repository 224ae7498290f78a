"""Trained parameters in fp32 under mixed precision, whatever dtype a model was loaded in."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxtrain._display import counted
from fxtrain.ops.logs import log
from fxtrain.precision import quantized_layers
from fxtrain.state import DistContext, Plan

HALF = (torch.bfloat16, torch.float16)


def raise_to_fp32(module: nn.Module, ctx: DistContext, plan: Plan) -> Callable[[], None]:
    """Convert trained parameters in half precision to fp32, if the plan mixes dtypes.

    Frozen and quantised parameters stay. Buffers of the same submodules follow, since torch's
    kernels of normalisations expect statistics in the dtype of their weights.

    Effects:
        Each parameter stays the same object, with new memory.

    Returns:
        A function that converts them back, also after a strategy has replaced them.
    """
    changed: list[tuple[dict[str, Any], str, torch.dtype]] = []
    trained = _trained_in_half(module) if _mixes_dtypes(plan) else {}
    for part in module.modules():
        parameters: dict[str, Any] = part._parameters
        names = [name for name, one in parameters.items() if id(one) in trained]
        changed += [(parameters, name, trained[id(parameters[name])].dtype) for name in names]
        buffers: dict[str, Any] = part._buffers if names else {}
        changed += [(buffers, name, b.dtype) for name, b in buffers.items() if _is_half(b)]
    formats = {str(one.dtype).removeprefix("torch.") for one in trained.values()}
    elements = sum(one.numel() for one in trained.values())
    for held, name, _ in changed:
        _convert(held[name], torch.float32)
    if trained:
        log(ctx, "fxtrain.plan").info(
            f"fx.wrap: {counted(len(trained), 'trained parameter')} "
            f"({counted(elements, 'element')}) in {' and '.join(sorted(formats))} converted to "
            f"fp32, which optimizers need under mixed precision. "
            f"fx.Precision(..., params='keep') keeps their dtype."
        )

    def undo() -> None:
        for held, name, dtype in changed:
            _convert(held[name], dtype)

    return undo


def _mixes_dtypes(plan: Plan) -> bool:
    """Whether forward and backward compute in another dtype than parameters have."""
    if plan.precision.params == "keep" or getattr(plan.strategy, "downcast", False):
        return False
    sharding = getattr(plan.strategy, "stages", None) or plan.strategy
    gathers = getattr(sharding, "param_dtype", "plan")
    return plan.precision.compute != "fp32" or gathers in ("bf16", "fp16")


def _trained_in_half(module: nn.Module) -> dict[int, nn.Parameter]:
    """By id, so that tied parameters count once."""
    hidden = {id(part.weight) for _, part, _ in quantized_layers(module)}
    return {
        id(one): one
        for one in module.parameters()
        if one.requires_grad and _is_half(one) and id(one) not in hidden and not is_lazy(one)
    }


def _is_half(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in HALF


def _convert(tensor: Tensor, dtype: torch.dtype) -> None:
    tensor.data = tensor.data.to(dtype)
    if tensor.grad is not None:
        tensor.grad = tensor.grad.to(dtype)
