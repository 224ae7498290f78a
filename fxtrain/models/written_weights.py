"""The weights of a model that a file is to contain, and why some cannot be written."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxtrain.errors import CheckpointError
from fxtrain.ops.whole_tensors import is_sharded, weight_of, weights_of, without_compile
from fxtrain.state import DistContext, Weight, Wrapped
from fxtrain.state.wrapped import check_open


def module_of(model: Any, call: str) -> nn.Module:
    """The user's module, without the wrappers around it; a CheckpointError if there is none."""
    if isinstance(model, Wrapped):
        check_open(model, call, CheckpointError)
    module = model.module if isinstance(model, Wrapped) else model
    if not isinstance(module, nn.Module):
        raise CheckpointError(
            f"{call} takes a model from fx.wrap or a torch.nn.Module, found "
            f"{type(module).__name__}."
        )
    while isinstance(module := without_compile(module), nn.parallel.DistributedDataParallel):
        module = module.module
    return module


def context_of(model: Any, ctx: DistContext | None, call: str) -> DistContext | None:
    """The context of a call: the one passed, or the model's."""
    if ctx is not None and not isinstance(ctx, DistContext):
        raise CheckpointError(f"{call}: ctx is a {type(ctx).__name__}. Pass a DistContext.")
    return model.ctx if ctx is None and isinstance(model, Wrapped) else ctx


def weights_by_name(model: Any, module: nn.Module | None) -> dict[str, Weight]:
    """The stored tensors of a model, or of a mapping if `module` is None, on whichever rank."""
    if isinstance(model, Wrapped):
        weights = model.strategy.weights(model)
    elif module is None:
        weights = {name: weight_of(tensor) for name, tensor in model.items()}
    else:
        weights = weights_of(module)
    return {name: weight for name, weight in weights.items() if weight.stored}


def ignored_names(module: nn.Module) -> set[str]:
    """Names of tensors that a transformers model computes, and files do not contain."""
    return {
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in getattr(part, "_keys_to_ignore_on_save", None) or ()
    }


def write_problems(weights: Mapping[str, Weight], allowed: Mapping[torch.dtype, str]) -> list[str]:
    """Reasons why tensors cannot be written, one line each."""
    return [
        f"{name} is {why}" for name, weight in weights.items() if (why := _problem(weight, allowed))
    ]


def _problem(weight: Weight, allowed: Mapping[torch.dtype, str]) -> str | None:
    tensor = weight.like
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}, not a tensor"
    if is_lazy(tensor):
        return "not initialized: run the model once"
    if hasattr(tensor, "ds_id") and not weight.together:
        return "partitioned by DeepSpeed ZeRO-3: pass the model from fx.wrap"
    if tensor.is_meta and weight.here:
        return "on the meta device and has no values"
    if tensor.is_complex():
        return f"complex ({tensor.dtype}): store torch.view_as_real(tensor)"
    if tensor.layout is not torch.strided or tensor.is_quantized or weight.dtype not in allowed:
        return f"a {tensor.layout} tensor of dtype {weight.dtype}, unsupported by the format"
    if not is_sharded(tensor) and hasattr(tensor, "__tensor_flatten__"):
        return f"a {type(tensor).__name__}, whose values are not in a single buffer"
    return None
