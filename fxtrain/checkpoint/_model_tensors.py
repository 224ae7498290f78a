"""The tensors of a model by name, which of them are one, and which part of them is here."""

import importlib
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxtrain._errors import CheckpointError
from fxtrain.state import DistContext, Wrapped

__all__ = [
    "Part",
    "context_of",
    "identity",
    "is_sharded",
    "module_of",
    "part_of",
    "problems_of",
    "tensors_of",
]

# Per dimension, the rows of the whole tensor that are on this rank: neighbours, or by number.
Part = tuple[slice | Tensor, ...]


def module_of(model: Any, call: str) -> nn.Module:
    """The user's module under what wrapping put around it.

    Raises:
        CheckpointError: this is no model.
    """
    module = model.module if isinstance(model, Wrapped) else model
    if not isinstance(module, nn.Module):
        raise CheckpointError(
            f"{call} takes what fx.wrap returned or a torch.nn.Module, found "
            f"{type(module).__name__}."
        )
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner  # torch.compile(module)
        else:
            return module


def context_of(model: Any, ctx: DistContext | None, call: str) -> DistContext | None:
    """The ranks that a call is made on: the model's, or those that were passed.

    Raises:
        CheckpointError: ctx is something else than a context.
    """
    if ctx is not None and not isinstance(ctx, DistContext):
        raise CheckpointError(f"{call}: ctx is a {type(ctx).__name__}, not a context.")
    return model.ctx if ctx is None and isinstance(model, Wrapped) else ctx


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """The module's own parameters and buffers by name, as in its state dict; not copies.

    Submodules that were compiled on their own have the names that they had before.
    """
    found = module.state_dict(keep_vars=True)
    return {name.replace("_orig_mod.", ""): value for name, value in found.items()}


def is_sharded(value: Any) -> bool:
    """Whether a tensor is torch's DTensor, without loading the package that defines it."""
    return hasattr(value, "placements") and hasattr(value, "full_tensor")


def identity(tensor: Tensor) -> Hashable:
    """Equal for two names of the same values, and for nothing else."""
    if is_sharded(tensor) or tensor.is_meta or tensor.numel() == 0 or tensor.data_ptr() == 0:
        return id(tensor)
    where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.is_neg())
    return (*where, tuple(tensor.shape), tensor.stride())


def problems_of(tensors: Mapping[str, Any], allowed: Mapping[torch.dtype, str]) -> list[str]:
    """What keeps tensors from being written, a line per leaf."""
    return [
        f"{name} is {why}" for name, tensor in tensors.items() if (why := _problem(tensor, allowed))
    ]


def _problem(tensor: Any, allowed: Mapping[torch.dtype, str]) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}, not a tensor"
    if is_lazy(tensor):
        return "not initialised: run the model once"
    if hasattr(tensor, "ds_id"):
        return "partitioned by DeepSpeed ZeRO-3: gather the weights first"
    if tensor.is_meta:
        return "on the meta device and has no values"
    if tensor.is_complex():
        return f"complex ({tensor.dtype}): store torch.view_as_real of it"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in allowed:
        return f"a {tensor.layout} tensor of dtype {tensor.dtype}, which the format cannot hold"
    if not is_sharded(tensor) and is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}, whose values are not in one place"
    return None


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
