"""The full tensors of a model on torch's own machinery, however they are sharded."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fxtrain import ops
from fxtrain.backends.core.parameter_dtypes import HALF
from fxtrain.ops.whole_tensors import weights_of
from fxtrain.state import DistContext, TensorIndex, Weight, Wrapped, round_of

_Gather = Callable[[], Tensor]
_Read = Callable[[TensorIndex | None], Tensor]


def torch_weights(model: Wrapped) -> dict[str, Weight]:
    """The tensors of the module by name.

    Where replicas may differ, the first replica's values are used: for buffers and, with
    independent replicas, for everything.

    Effects:
        No traffic. FSDP frees the parameters that it has gathered and not yet freed.
    """
    for part in model.module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # the registered parameters are then the shards
    found, now = weights_of(model.module), round_of(model)
    for name, weight in found.items():
        if not isinstance(weight.like, nn.Parameter):
            found[name] = from_first_rank(weight, model.ctx.axis("loss"))
        elif now is not None:
            found[name] = from_first_rank(weight, now.copies)
    if now is not None and now.anchor:
        _move_anchors(found, now.anchor)
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
        if weight.dtype is torch.float32 and model.formats.get(name) in HALF
    }
    return {**weights, **in_user_dtypes(raised, model)}


def in_user_dtypes(weights: dict[str, Weight], model: Wrapped) -> dict[str, Weight]:
    """The same tensors, in the user's original dtypes where training uses others."""
    return {
        name: attrs.evolve(
            weight,
            dtype=model.formats[name],
            gather=functools.partial(_cast, weight.gather, model.formats[name]),
        )
        if model.formats.get(name, weight.dtype) != weight.dtype
        else weight
        for name, weight in weights.items()
    }


def _move_anchors(weights: dict[str, Weight], anchors: Any) -> None:
    """Base the next averaging round on the values that were filled in."""
    for name, anchor in anchors.items():
        if name in weights:
            weight = weights[name]
            fill = functools.partial(_fill_both, weight, anchor)
            weights[name] = attrs.evolve(weight, fill=fill)


@torch.no_grad()
def _fill_both(weight: Weight, anchor: Tensor, read: _Read) -> None:
    weight.fill(read)
    anchor.copy_(weight.like)


def _broadcast(gather: _Gather, copies: DistContext) -> Tensor:
    return ops.broadcast(gather(), copies)


def _cast(gather: _Gather, dtype: torch.dtype) -> Tensor:
    return gather().to(dtype)
