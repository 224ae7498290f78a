"""Whole, full-precision values of what DeepSpeed spreads and rounds."""

from typing import Any

import torch
from torch import Tensor, nn

from fxtrain.backends._deepspeed_engine import load
from fxtrain.state import Wrapped

__all__ = ["whole_values"]


@torch.no_grad()
def whole_values(model: Wrapped) -> list[Tensor]:
    """A copy of every parameter, in the order of the module, from its full-precision master.

    Effects:
        Gathers parameter by parameter; every rank must take part.
    """
    masters = _plain_masters(model.engine.optimizer)
    device = model.ctx.device
    return [_whole(parameter, masters).to(device) for parameter in model.module.parameters()]


def _plain_masters(optimizer: Any) -> dict[nn.Parameter, Tensor]:
    """Parameter to master at stage 0 in half precision."""
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {
        weight: master
        for weights, masters in pairs
        for weight, master in zip(weights, masters, strict=True)
    }


def _whole(parameter: nn.Parameter, masters: dict[nn.Parameter, Tensor]) -> Tensor:
    library = load()
    if parameter in masters:
        return masters[parameter].detach().clone()
    spread = hasattr(parameter, "ds_id")
    trained = hasattr(parameter, "_z3_optimizer" if spread else "_hp_mapping")
    if trained and parameter.requires_grad:
        found = library.utils.safe_get_full_fp32_param(parameter)
        if found is not None:
            return found.detach().clone()
    if not spread:
        return parameter.detach().clone()
    with library.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()
