"""The full tensors of a model on torch's own machinery, and the dtypes of trained parameters."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy

from fxtrain import _extensions, ops
from fxtrain._display import counted
from fxtrain.ops.logs import log
from fxtrain.ops.whole_tensors import weights_of
from fxtrain.state import DistContext, Weight, Wrapped

HALF = (torch.bfloat16, torch.float16)


def torch_weights(model: Wrapped) -> dict[str, Weight]:
    """The tensors of the module by name.

    Of buffers, in which replicas may differ, the first replica's values are used.

    Effects:
        No traffic. FSDP frees the parameters that it has gathered and not yet freed.
    """
    for part in model.module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # the registered parameters are then the shards
    weights = weights_of(model.module)
    for name, weight in weights.items():
        if not isinstance(weight.like, nn.Parameter):
            weights[name] = from_first_rank(weight, model.ctx.axis("loss"))
    return in_loaded_dtypes(weights, model)


def from_first_rank(weight: Weight, copies: DistContext) -> Weight:
    """The same tensors, with the values of the first of some ranks on all of them."""
    if copies.world_size == 1 or not isinstance(weight.like, Tensor):
        return weight
    return attrs.evolve(weight, gather=lambda: ops.broadcast(weight.gather(), copies))


def in_loaded_dtypes(weights: dict[str, Weight], model: Wrapped) -> dict[str, Weight]:
    """The same tensors, in half precision where `wrap` has converted that to fp32."""
    raised = {
        name: weight
        for name, weight in weights.items()
        if weight.dtype is torch.float32 and model.dtypes.get(name) in HALF
    }
    return {**weights, **in_user_dtypes(raised, model)}


def in_user_dtypes(weights: dict[str, Weight], model: Wrapped) -> dict[str, Weight]:
    """The same tensors, in the user's original dtypes where training uses others."""
    return {
        name: attrs.evolve(
            weight,
            dtype=model.dtypes[name],
            gather=lambda weight=weight, dtype=model.dtypes[name]: weight.gather().to(dtype),
        )
        if model.dtypes.get(name, weight.dtype) != weight.dtype
        else weight
        for name, weight in weights.items()
    }


def raise_to_fp32(module: nn.Module, ctx: DistContext) -> Callable[[], None]:
    """Convert trained parameters in half precision to fp32.

    Frozen and quantized parameters stay. Buffers of the same submodules follow, since torch's
    kernels of normalizations expect statistics in the dtype of their weights.

    Effects:
        Each parameter stays the same object, with new memory.

    Returns:
        A function that converts them back, also after a strategy has replaced them.
    """
    changed: list[tuple[dict[str, Any], str, torch.dtype]] = []
    trained = _trained_in_half(module)
    for part in module.modules():
        parameters: dict[str, Any] = part._parameters
        names = [name for name, parameter in parameters.items() if id(parameter) in trained]
        changed += [(parameters, name, trained[id(parameters[name])].dtype) for name in names]
        buffers: dict[str, Any] = part._buffers if names else {}
        changed += [(buffers, name, b.dtype) for name, b in buffers.items() if _is_half(b)]
    formats = {str(parameter.dtype).removeprefix("torch.") for parameter in trained.values()}
    elements = sum(parameter.numel() for parameter in trained.values())
    for tensors, name, _ in changed:
        _convert(tensors[name], torch.float32)
    if trained:
        log(ctx, "fxtrain.plan").info(
            f"fx.wrap: {counted(len(trained), 'trained parameter')} "
            f"({counted(elements, 'element')}) in {' and '.join(sorted(formats))} converted to "
            f"fp32, which optimizers need under mixed precision. "
            f"fx.Precision(..., params='keep') keeps their dtype."
        )

    def undo() -> None:
        for tensors, name, dtype in changed:
            _convert(tensors[name], dtype)

    return undo


def _trained_in_half(module: nn.Module) -> dict[int, nn.Parameter]:
    """By id, so that tied parameters count once."""
    return {
        id(parameter): parameter
        for parameter in _extensions.plain_parameters(module)
        if parameter.requires_grad and _is_half(parameter) and not is_lazy(parameter)
    }


def _is_half(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.dtype in HALF


def _convert(tensor: Tensor, dtype: torch.dtype) -> None:
    tensor.data = tensor.data.to(dtype)
    if tensor.grad is not None:
        tensor.grad = tensor.grad.to(dtype)
