"""Where the tensors of a split model are registered, and their full values."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch import distributed as dist

from fxtrain.backends.core.weights import from_first_rank, in_loaded_dtypes, torch_weights
from fxtrain.backends.pipeline.partition import Partition
from fxtrain.ops.whole_tensors import plain_name, weight_of
from fxtrain.state import DistContext, TensorIndex, Weight, Wrapped


@attrs.frozen(eq=False)
class TensorSlot:
    """Where a parameter or buffer is registered in a module.

    Attributes:
        name: In the model.
        path: Of the module that owns it.
        key: Its name there.
        held: That module's own parameters or buffers; the entry is None if only other ranks hold
            the tensor.
        like: A fake tensor like the full one; one for all names of a tied parameter.
        stored: Whether the module's state dict contains it.
    """

    name: str
    path: str
    key: str
    held: dict[str, Any]
    like: Tensor
    stored: bool


def tensor_slots(module: nn.Module) -> tuple[TensorSlot, ...]:
    """Every entry of a whole module: those in its state dict first, in its order."""
    stored = {name: place for place, name in enumerate(module.state_dict(keep_vars=True))}
    likes: dict[int, Tensor] = {}
    places: list[TensorSlot] = []
    for path, part in module.named_modules(remove_duplicate=False):
        for held in (part._parameters, part._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    like = likes.setdefault(id(tensor), _like(tensor))
                    places.append(TensorSlot(name, path, key, held, like, name in stored))
    return tuple(sorted(places, key=lambda place: stored.get(place.name, len(stored))))


def full_tensor_of(
    place: TensorSlot, partition: Partition, axis: DistContext, device: torch.device
) -> Tensor:
    """The full value of an entry, on every rank of the pipeline.

    Effects:
        Gathers it if it is sharded; the first rank that holds it sends it to the pipeline if some
        rank does not hold it.
    """
    held = partition.holders(place.name)
    everywhere = len(held) == axis.world_size
    # Every rank that holds a part joins the gather, also those to which the full value is sent.
    tensor = place.held[place.key]
    own = None if tensor is None else weight_of(tensor).gather().to(device)
    if own is not None and (everywhere or axis.rank == held[0]):
        whole = own if everywhere else own.contiguous()
    else:
        whole = torch.empty(place.like.shape, dtype=place.like.dtype, device=device)
    if not everywhere:
        dist.broadcast(whole, axis.comm.ranks[held[0]], group=axis.comm.group)
    return whole


def pipeline_weights(model: Wrapped) -> dict[str, Weight]:
    """The tensors of the module by name, the same names on every rank.

    Effects:
        No traffic.
    """
    engine = model.engine
    if engine is model.module:
        return torch_weights(model)
    shells = dict(next(iter(engine.stages.values())).shell.named_buffers(remove_duplicate=False))
    found: dict[str, Weight] = {}
    for place in engine.places:
        here = place.held[place.key] is not None
        gather = functools.partial(
            full_tensor_of, place, engine.partition, engine.axis, model.ctx.device
        )
        weight = Weight(
            like=place.held[place.key] if here else place.like,
            shape=tuple(place.like.shape),
            dtype=place.like.dtype,
            key=id(place.like),
            here=here,
            gather=gather,
            fill=functools.partial(_fill, place, shells.get(place.name)),
            stored=place.stored,
        )
        is_parameter = isinstance(place.like, nn.Parameter)
        weight = weight if is_parameter else from_first_rank(weight, model.ctx.axis("data"))
        found[plain_name(place.name)] = weight
    return in_loaded_dtypes(found, model)


def _fill(
    place: TensorSlot, of_stage: Tensor | None, read: Callable[[TensorIndex | None], Tensor]
) -> None:
    """Fill what this rank holds, and buffers of other stages with which its own compute."""
    tensor = place.held[place.key]
    tensor = of_stage if tensor is None else tensor
    if tensor is not None:
        weight_of(tensor).fill(read)


def _like(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made
