"""A block after which a model is as it was before it, bit for bit."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain import ops
from fxtrain.ops.whole_tensors import local_values
from fxtrain.state import DistContext, FlatShard, StateReader, Wrapped


@contextmanager
def kept_state(ctx: DistContext, model: Wrapped) -> Iterator[None]:
    """Restore a model, its optimizers, schedulers and loss scale, and random state, after a block.

    Effects:
        Memory for a copy of what a checkpoint of this model contains, on the model's devices.
        Communicates as far as the strategy does to read and to restore its state.
    """
    state = model.strategy.state(model)
    tensors = {name: _copied(tensor) for name, tensor in state.tensors.items()}
    own = {name: tensor.detach().clone() for name, tensor in state.own.items()}
    saved = StateReader(
        shapes={name: _format(tensor) for name, tensor in tensors.items()},
        fill=lambda name, tensor: _fill(tensor, tensors[name]),
        values=copy.deepcopy(state.values),
        # A rank reads only its own tensors where the same ranks load.
        own=lambda name, rank: own.get(name),
        ranks=ctx.world_size,
        rank=ctx.rank,
        loading_ranks=ctx.world_size,
    )
    with ops.fork_rng(ctx):
        try:
            yield
        finally:
            model.strategy.load_state(model, saved)


def _copied(tensor: Any) -> Any:
    if isinstance(tensor, FlatShard):
        return attrs.evolve(tensor, values=tensor.values.detach().clone())
    return tensor.detach().clone()


def _format(tensor: Any) -> tuple[tuple[int, ...], torch.dtype]:
    dtype = tensor.values.dtype if isinstance(tensor, FlatShard) else tensor.dtype
    return tuple(tensor.shape), dtype


@torch.no_grad()
def _fill(tensor: Any, kept: Any) -> None:
    _local(tensor).copy_(_local(kept))


def _local(tensor: Any) -> Tensor:
    """This rank's values, sharing memory."""
    if isinstance(tensor, FlatShard):
        return tensor.values
    return local_values(tensor)
