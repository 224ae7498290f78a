"""Optimizer states of torchao, each a tensor that holds packed values and their scales.

Of a sharded parameter it is a DTensor over such tensors. A scale belongs to a block of consecutive
values, so that equal shards of whole blocks can be resharded bit for bit.
"""

import importlib
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from fxtrain.errors import CheckpointError
from fxtrain.ops.whole_tensors import local_part

_SMALLEST = 4096  # values of a local part below which torchao's states are plain

# A checkpoint names a class of this table, never one to import.
_PACKED = ("8bit", "4bit", "Fp8")  # ends of the names of its optimizers
_TABLE = "qmap"  # equal on all ranks
_CLASSES = {
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}


def has_packed_states(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of torchao's that pack their states."""
    return any(
        kind.__module__.partition(".")[0] == "torchao" and kind.__name__.endswith(_PACKED)
        for kind in type(optimizer).__mro__
    )


def step_without_cache(optimizer: torch.optim.Optimizer) -> None:
    """Have an optimizer over shards compile its update without torch's cache of graphs on disk.

    The cache takes the states of one class for those of another, since it looks at the shape and
    dtype of a DTensor only: a graph of AdamW8bit would run in AdamW4bit, with an error.
    """
    settings: Any = torch.compiler.config
    without_cache = settings.patch(force_disable_caches=True)
    optimizer.step = MethodType(without_cache(type(optimizer).step), optimizer)


def is_packed(value: Any) -> bool:
    """Whether a state is such a tensor, which has no memory of its own."""
    value = local_part(value)
    return _CLASSES.get(type(value).__name__) == type(value).__module__


def pack_value(value: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors inside a state, live, and what else describes it, as plain values."""
    sharded = isinstance(value, DTensor)
    local: Any = local_part(value)
    names, attributes = local.__tensor_flatten__()
    tensors = {name: getattr(local, name) for name in names}
    if sharded:
        attributes = [value.shape if isinstance(a, torch.Size) else a for a in attributes]
        tensors = {
            name: each if name == _TABLE else _over_ranks(each, value)
            for name, each in tensors.items()
        }
    return tensors, {
        "class": type(local).__name__,
        "tensors": list(names),
        "attributes": [_plain(each) for each in attributes],
    }


def shard_problem(parameter: Tensor) -> str | None:
    """Why packed states of a parameter cannot be updated, saved or resharded; None if they can.

    All ranks have to keep states of the same kind, which they do for equal shards.
    """
    if not isinstance(parameter, DTensor):
        return None
    if parameter.dtype != torch.float32:
        return (
            f"is in {str(parameter.dtype).removeprefix('torch.')}, of which torchao updates no "
            f"shards. Keep the parameters in fp32, where precision='bf16' computes in bf16"
        )
    count = _shards(parameter)
    if count is None:
        return f"is sharded as {parameter.placements}, and not along its first dim only"
    rows = parameter.shape[0] if parameter.ndim else 1
    largest = -(-rows // count) * parameter.shape[1:].numel()
    if rows % count and largest >= _SMALLEST:
        return f"has {rows} rows, which {count} shards do not divide"
    return None


def _shards(parameter: DTensor) -> int | None:
    """Among how many ranks a parameter is split along its first dim; None if otherwise."""
    split = [
        dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()
    ]
    if any(parameter.placements[dim] != Shard(0) for dim in split) or len(split) > 1:
        return None
    return parameter.device_mesh.size(split[0]) if split else 1


def _over_ranks(local: Tensor, like: DTensor) -> Tensor:
    """The parts of all ranks as one tensor, sharded as a state is."""
    count = _shards(like) or 1
    shape, stride = like.shape, like.stride()
    if local.shape != local_part(like).shape:  # one entry per block, or several values in one
        shape, stride = torch.Size([count * local.numel()]), (1,)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def unpack_value(
    facts: Mapping[str, Any], read: Callable[[str], Tensor], parameter: Tensor | None = None
) -> Tensor:
    """A state from the values of a checkpoint.

    Args:
        facts: What `pack_value` returned beside the tensors.
        read: (name) → the full tensor of that name, or one sharded as the parameter.
        parameter: Whose state it is.

    Raises:
        CheckpointError: the checkpoint has a state of another class, or the parameter's shards
            would cut blocks.
    """
    home = _CLASSES.get(facts["class"])
    if home is None:
        raise CheckpointError(
            f"This checkpoint has optimizer states of class {facts['class']!r}; known are "
            f"{', '.join(_CLASSES)}. Restore it with the version of fxtrain that saved it."
        )
    kind = getattr(importlib.import_module(home), facts["class"])
    tensors = {name: read(name) for name in facts["tensors"]}
    attributes = [_value(each) for each in facts["attributes"]]
    if not isinstance(parameter, DTensor):
        return kind.__tensor_unflatten__(tensors, attributes)
    _check_blocks(parameter, parameter.numel() // tensors["scale"].numel())
    local = {
        name: each if name == _TABLE else _of_rank(each, parameter)
        for name, each in tensors.items()
    }
    shape = local_part(parameter).shape
    attributes = [shape if isinstance(each, torch.Size) else each for each in attributes]
    return DTensor.from_local(
        kind.__tensor_unflatten__(local, attributes),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _check_blocks(parameter: DTensor, block: int) -> None:
    problem, count = shard_problem(parameter), _shards(parameter) or 1
    if problem is None and parameter.numel() // count % block:
        problem = f"has {parameter.numel()} values, of which {count} shards cut blocks of {block}"
    if problem is not None:
        raise CheckpointError(
            f"This checkpoint has optimizer states in blocks with a common scale, and a parameter "
            f"of this model {problem}. Restore at another world size, or without sharding."
        )


def _of_rank(tensor: Tensor, like: DTensor) -> Tensor:
    """This rank's part of a tensor."""
    if isinstance(tensor, DTensor):
        return local_part(tensor)
    dims = [dim for dim, placement in enumerate(like.placements) if not placement.is_replicate()]
    if not dims:
        return tensor
    length = tensor.numel() // like.device_mesh.size(dims[0])
    start = like.device_mesh.get_local_rank(dims[0]) * length
    return tensor[start : start + length].clone()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _value(plain: Any) -> Any:
    if isinstance(plain, str):
        return getattr(torch, plain.removeprefix("torch."))
    return torch.Size(plain) if isinstance(plain, list) else plain
