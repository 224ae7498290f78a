"""What DeepSpeed leaves on a module, and how to remove it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxtrain.ops.step_parts import DTYPES
from fxtrain.state import Plan

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def record_changes(module: nn.Module) -> Callable[[], None]:
    """Record a module's attributes, hooks and dtypes; return a function that restores them.

    Values of parameters are not recorded: training changes them.
    """
    parts = [(part, set(vars(part)), _hook_keys(part)) for part in module.modules()]
    tensors = [
        (tensor, tensor.dtype, set(vars(tensor)))
        for tensor in (*module.parameters(), *module.buffers())
    ]

    def restore() -> None:
        for part, names, keys in parts:
            part._parameters = dict(part._parameters)
            for name in vars(part).keys() - names:
                del part.__dict__[name]
            for name, known in keys.items():
                hooks = getattr(part, name)
                for key in [key for key in hooks if key not in known]:
                    del hooks[key]
        for tensor, dtype, names in tensors:
            tensor.data = tensor.data.to(dtype)
            for name in vars(tensor).keys() - names:
                delattr(tensor, name)

    return restore


def _hook_keys(part: nn.Module) -> dict[str, set[Any]]:
    return {name: set(getattr(part, name)) for name in _HOOKS}


def autocast_inside(module: nn.Module, plan: Plan, device: str) -> None:
    """Run a module's forward under autocast, inside what the engine puts around it.

    DeepSpeed disables an autocast region that it finds around an engine. Over weights in the same
    dtype, autocast only affects the inputs.
    """
    if plan.precision.compute != "fp32":
        dtype = DTYPES[plan.precision.compute]
        module.forward = functools.partial(_under_autocast, module.forward, device, dtype)


def _under_autocast(
    forward: Callable[..., Any], device: str, dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    with torch.autocast(device, dtype=dtype):
        return forward(*args, **kwargs)


def watch_gradients(module: nn.Module, count: torch.Tensor) -> None:
    """Count non-finite gradients as backward computes them.

    Afterwards they are in the engine's buffers, in a form that depends on stage and offload.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(functools.partial(_note, count))


def _note(count: torch.Tensor, grad: torch.Tensor) -> None:
    count.add_(~torch.isfinite(grad).all())
