"""A model's state in memory: what a checkpoint of it contains, as tensors of this rank."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxtrain.ops.whole_tensors import local_values
from fxtrain.state import DistContext, FlatShard, StateReader


def local_part_of(tensor: Any) -> Tensor:
    """This rank's values of a tensor, a DTensor or a `FlatShard`, sharing memory."""
    return tensor.values.detach() if isinstance(tensor, FlatShard) else local_values(tensor)


def format_of(tensor: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a whole tensor."""
    dtype = tensor.values.dtype if isinstance(tensor, FlatShard) else tensor.dtype
    return tuple(tensor.shape), dtype


def memory_reader(
    ctx: DistContext,
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    parts: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    values: Any,
) -> StateReader:
    """A reader for `Strategy.load_state` of a state that the same ranks hold in memory.

    Args:
        shapes: Shape and dtype of the whole tensors, by name.
        parts: This rank's parts of them.
        own: Tensors that belong to this rank only.
        values: The plain values of the state.
    """

    def fill(name: str, tensor: Any) -> None:
        with torch.no_grad():
            local_part_of(tensor).copy_(parts[name])

    return StateReader(
        shapes=shapes,
        fill=fill,
        values=values,
        # A rank reads only its own tensors where the same ranks load.
        own=lambda name, rank: own.get(name),
        ranks=ctx.world_size,
        rank=ctx.rank,
        loading_ranks=ctx.world_size,
    )
