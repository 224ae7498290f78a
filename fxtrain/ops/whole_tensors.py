"""The tensors of a module by name: which of them are one, which part is here, and the whole."""

import functools
import importlib
from collections.abc import Callable, Hashable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxtrain._errors import CheckpointError
from fxtrain.state import Part, Weight

__all__ = ["identity", "is_sharded", "part_of", "plain_name", "weight_of", "weights_of"]


def weights_of(module: nn.Module) -> dict[str, Weight]:
    """Every tensor of a module by name: those of its state dict in order, then all others.

    Effects:
        No traffic. Tensors stay where they are.
    """
    stored = module.state_dict(keep_vars=True)
    found = {plain_name(name): weight_of(value) for name, value in stored.items()}
    known = {id(value) for value in stored.values()}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if id(tensor) not in known:
                found.setdefault(plain_name(name), attrs.evolve(weight_of(tensor), stored=False))
    return found


def weight_of(tensor: Any) -> Weight:
    """A tensor that this rank holds, or a part of which, as torch's DTensor.

    What is no tensor is taken too, for who checks it: state dicts hold other things.
    """
    return Weight(
        like=tensor,
        shape=() if is_lazy(tensor) else tuple(getattr(tensor, "shape", ())),
        dtype=getattr(tensor, "dtype", torch.uint8),
        key=identity(tensor) if isinstance(tensor, Tensor) else id(tensor),
        gather=functools.partial(_full_tensor, tensor),
        fill=functools.partial(_fill, tensor),
    )


def plain_name(name: str) -> str:
    """A name as it was before a submodule was compiled on its own."""
    return name.replace("_orig_mod.", "")


def is_sharded(value: Any) -> bool:
    """Whether a tensor is torch's DTensor, without loading the package that defines it."""
    return hasattr(value, "placements") and hasattr(value, "full_tensor")


def identity(tensor: Tensor) -> Hashable:
    """Equal for two names of the same values, and for nothing else."""
    if is_sharded(tensor) or is_lazy(tensor) or tensor.layout is not torch.strided:
        return id(tensor)
    if tensor.is_meta or tensor.numel() == 0 or tensor.data_ptr() == 0:
        return id(tensor)
    where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.is_neg())
    return (*where, tuple(tensor.shape), tensor.stride())


def part_of(tensor: Any) -> Part | None:
    """Which rows of the whole a DTensor holds on this rank; None for a plain tensor.

    Effects:
        No traffic: torch itself is asked how it would lay out the row numbers.

    Raises:
        CheckpointError: the local values are a summand of the whole, not a part.
    """
    if not is_sharded(tensor):
        return None
    # Loaded already, since there is a DTensor; importing it costs over a second otherwise.
    package = importlib.import_module("torch.distributed.tensor")
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"A tensor with the placements {tensor.placements} holds summands of its values. "
            f"Redistribute it to Shard or Replicate first."
        )
    return tuple(_rows(tensor, dim, package) for dim in range(tensor.ndim))


def _rows(tensor: Any, dim: int, package: Any) -> slice | Tensor:
    size = tensor.shape[dim]
    along = [
        one if getattr(one, "dim", None) in (dim, dim - tensor.ndim) else package.Replicate()
        for one in tensor.placements
    ]
    if all(one.is_replicate() for one in along):
        return slice(0, size)
    numbers = torch.arange(size).reshape([-1 if d == dim else 1 for d in range(tensor.ndim)])
    laid = package.distribute_tensor(numbers, tensor.device_mesh, along, src_data_rank=None)
    mine = laid.to_local().flatten().cpu()
    start, stop = (int(mine[0]), int(mine[-1]) + 1) if len(mine) else (0, 0)
    return slice(start, stop) if stop - start == len(mine) else mine


@torch.no_grad()
def _full_tensor(tensor: Any) -> Tensor:
    return tensor.detach().full_tensor() if is_sharded(tensor) else tensor.detach()


@torch.no_grad()
def _fill(tensor: Any, read: Callable[[Part | None], Tensor]) -> None:
    value = read(part_of(tensor))
    (tensor.to_local() if is_sharded(tensor) else tensor).copy_(value)
