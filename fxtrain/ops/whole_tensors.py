"""The tensors of a module by name: which are tied, which part is local, and the full tensors."""

import functools
import importlib
from collections.abc import Callable, Hashable
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxtrain.errors import CheckpointError
from fxtrain.precision import is_sharded, quantized_layers, stored_tensors
from fxtrain.state import TensorIndex, Weight


def weights_of(module: nn.Module) -> dict[str, Weight]:
    """Every tensor of a module by name: those of its state dict in order, then all others.

    Effects:
        No traffic; no tensor is copied.
    """
    stored = stored_tensors(module)
    found = {plain_name(name): weight_of(value) for name, value in stored.items()}
    known = {id(value) for value in stored.values()}
    known |= {id(part.weight) for _, part, _ in quantized_layers(module)}
    for named in (module.named_parameters, module.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            if id(tensor) not in known:
                found.setdefault(plain_name(name), attrs.evolve(weight_of(tensor), stored=False))
    return found


def weight_of(tensor: Any) -> Weight:
    """The record of a tensor of this rank, which may be a DTensor.

    Accepts values that are not tensors, which state dicts may contain; callers check them.
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
    """A name without the prefixes that compiling a submodule adds."""
    return name.replace("_orig_mod.", "")


def local_values(tensor: Any) -> Tensor:
    """This rank's part of a tensor that may be a DTensor, sharing memory, without a gradient.

    Effects:
        No traffic.
    """
    local: Any = (tensor.to_local() if is_sharded(tensor) else tensor).detach()
    # torchao's weights that are gathered in float8 have no memory of their own.
    casts = type(local).__name__ == "WeightWithDynamicFloat8CastTensor"
    return local._tensor if casts else local


def identity(tensor: Tensor) -> Hashable:
    """A key that is equal for two tensors only if they are the same values in memory."""
    if is_sharded(tensor) or is_lazy(tensor) or tensor.layout is not torch.strided:
        return id(tensor)
    if tensor.is_meta or tensor.numel() == 0 or tensor.data_ptr() == 0:
        return id(tensor)
    where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.is_neg(), tensor.is_conj())
    return (*where, tuple(tensor.shape), tensor.stride())


def part_of(tensor: Any) -> TensorIndex | None:
    """The indices, by dimension, of a DTensor's local part; None for a plain tensor.

    Effects:
        No traffic: torch distributes a tensor of indices in the same way.

    Raises:
        CheckpointError: the DTensor has a Partial placement.
    """
    if not is_sharded(tensor):
        return None
    # Imported already, since there is a DTensor; otherwise the import takes over a second.
    package = importlib.import_module("torch.distributed.tensor")
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"A DTensor with placements {tensor.placements} has only partial sums on each rank. "
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
    numbers = torch.arange(size, device="cpu").reshape(
        [-1 if d == dim else 1 for d in range(tensor.ndim)]
    )
    laid = package.distribute_tensor(numbers, tensor.device_mesh, along, src_data_rank=None)
    mine = laid.to_local().flatten().cpu()
    start, stop = (int(mine[0]), int(mine[-1]) + 1) if len(mine) else (0, 0)
    return slice(start, stop) if stop - start == len(mine) else mine


@torch.no_grad()
def _full_tensor(tensor: Any) -> Tensor:
    return tensor.detach().full_tensor() if is_sharded(tensor) else tensor.detach()


@torch.no_grad()
def _fill(tensor: Any, read: Callable[[TensorIndex | None], Tensor]) -> None:
    value = read(part_of(tensor))
    local_values(tensor).copy_(value)
