"""Full-precision values of what DeepSpeed shards and rounds: full, or this rank's part."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain.backends.deepspeed.engine import load
from fxtrain.state import FlatShard, Wrapped


@torch.no_grad()
def local_values(model: Wrapped) -> list[Tensor | FlatShard]:
    """This rank's part of every parameter, in the order of the module, in full precision.

    Effects:
        Gathers frozen parameters that are on nvme or quantized; every rank must take part.
    """
    masters = plain_masters(model.engine.optimizer)
    return [_local_master(parameter, masters) for parameter in model.module.parameters()]


def local_state(parameter: nn.Parameter, key: str) -> FlatShard:
    """This rank's part of an optimizer's state of a sharded parameter."""
    if hasattr(parameter, "ds_id"):
        mine = load().utils.safe_get_local_optimizer_state(parameter, key)
        return _part(parameter, mine)
    return _fragment(parameter, key)


@torch.no_grad()
def fill_local(
    parameter: Any, key: str | None, dtype: torch.dtype, fill: Callable[[FlatShard], object]
) -> None:
    """Let `fill` set this rank's part of a sharded parameter's master, or of a state of it."""
    if hasattr(parameter, "ds_id"):
        utils = load().utils
        values = torch.zeros(parameter.partition_numel(), dtype=dtype, device="cpu")
        fill(_part(parameter, values))
        if key is None:
            utils.safe_set_local_fp32_param(parameter, values)
        else:
            utils.safe_set_local_optimizer_state(parameter, values, key)
    elif (mapping := parameter._hp_mapping) is not None:
        held = mapping.get_hp_fragment(key)
        values = torch.empty(held.shape, dtype=dtype, device="cpu")
        start = mapping.lp_fragment_address.start
        fill(FlatShard(shape=tuple(parameter.shape), start=start, values=values))
        held.data.copy_(values)


def _local_master(parameter: Any, masters: dict[nn.Parameter, Tensor]) -> Tensor | FlatShard:
    if not hasattr(parameter, "ds_id"):
        if _is_trained(parameter):
            return _fragment(parameter)
        master = masters.get(parameter)
        return (parameter if master is None else master).detach()
    if _is_trained(parameter):
        return _part(parameter, load().utils.safe_get_local_fp32_param(parameter).float())
    here = parameter.ds_tensor
    if here.final_location is not None or hasattr(here, "ds_quant_scale"):
        return full_value(parameter, masters)
    return _part(parameter, here)


def _is_trained(parameter: nn.Parameter) -> bool:
    spread = hasattr(parameter, "ds_id")
    return parameter.requires_grad and hasattr(
        parameter, "_z3_optimizer" if spread else "_hp_mapping"
    )


def _part(parameter: Any, values: Tensor) -> FlatShard:
    """At stage 3: ranks have parts of one length, of which the last may be padded."""
    rank = load().comm.get_rank(group=parameter.ds_process_group)
    start = min(rank * values.numel(), parameter.ds_numel)
    mine = values.flatten()[: parameter.ds_numel - start]
    return FlatShard(shape=tuple(parameter.ds_shape), start=start, values=mine.cpu())


def _fragment(parameter: Any, key: str | None = None) -> FlatShard:
    """At stages 1 and 2, where a rank may have no part of a parameter."""
    mapping, shape = parameter._hp_mapping, tuple(parameter.shape)
    if mapping is None:
        return FlatShard(shape=shape, start=0, values=torch.empty(0, device="cpu"))
    values = mapping.get_hp_fragment(key)
    values = values.float() if key is None else values
    return FlatShard(shape=shape, start=mapping.lp_fragment_address.start, values=values.cpu())


def plain_masters(optimizer: Any) -> dict[nn.Parameter, Tensor]:
    """Parameter to master at stage 0 in half precision."""
    if not hasattr(optimizer, "fp32_groups"):
        return {}
    pairs = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {
        weight: master
        for weights, masters in pairs
        for weight, master in zip(weights, masters, strict=True)
    }


@torch.no_grad()
def full_value(parameter: Any, masters: dict[nn.Parameter, Tensor]) -> Tensor:
    """A copy of the full value of a parameter, from its full-precision master.

    Args:
        masters: From `plain_masters`.

    Effects:
        Gathers what is sharded; every rank must take part.
    """
    library = load()
    if parameter in masters:
        return masters[parameter].detach().clone()
    spread = hasattr(parameter, "ds_id")
    if _is_trained(parameter):
        found = library.utils.safe_get_full_fp32_param(parameter)
        if found is not None:
            return found.detach().clone()
    if not spread:
        return parameter.detach().clone()
    with library.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()
