"""The full tensors of a model on torch's own machinery, however they are sharded."""

import functools
from collections.abc import Callable

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fxtrain import ops
from fxtrain.backends.core.parameter_dtypes import HALF
from fxtrain.ops.whole_tensors import weights_of
from fxtrain.state import DistContext, TensorIndex, Weight, Wrapped

_Gather = Callable[[], Tensor]
_Read = Callable[[TensorIndex | None], Tensor]


def torch_weights(model: Wrapped) -> dict[str, Weight]:
    """The tensors of the module by name.

    Of buffers, in which replicas may differ, the first replica's values are used.

    Effects:
        No traffic. FSDP frees the parameters that it has gathered and not yet freed.
    """
    for part in model.module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # the registered parameters are then the shards
    found = weights_of(model.module)
    for name, weight in found.items():
        if not isinstance(weight.like, nn.Parameter):
            found[name] = from_first_rank(weight, model.ctx.axis("loss"))
    return in_loaded_dtypes(found, model)


def from_first_rank(weight: Weight, copies: DistContext) -> Weight:
    """The same tensors, with the values of the first of some ranks on all of them."""
    if copies.world_size == 1 or not isinstance(weight.like, Tensor):
        return weight
    return attrs.evolve(weight, gather=functools.partial(_broadcast, weight.gather, copies))


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
            gather=functools.partial(_cast, weight.gather, model.dtypes[name]),
        )
        if model.dtypes.get(name, weight.dtype) != weight.dtype
        else weight
        for name, weight in weights.items()
    }


def _broadcast(gather: _Gather, copies: DistContext) -> Tensor:
    return ops.broadcast(gather(), copies)


def _cast(gather: _Gather, dtype: torch.dtype) -> Tensor:
    return gather().to(dtype)
