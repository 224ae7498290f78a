"""Optimizer states of torchao, each a tensor that holds packed values and their scales."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxtrain._errors import CheckpointError

__all__ = ["is_packed", "pack", "unpack"]

# A checkpoint names a class of this table, never one to import.
_CLASSES = {
    "OptimState4bit": "torchao.optim.subclass_4bit",
    "OptimState8bit": "torchao.optim.subclass_8bit",
    "OptimStateFp8": "torchao.optim.subclass_fp8",
}


def is_packed(value: Any) -> bool:
    """Whether a state is such a tensor, which has no memory of its own."""
    return _CLASSES.get(type(value).__name__) == type(value).__module__


def pack(value: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors inside a state, live, and what else describes it, as plain values."""
    names, attributes = value.__tensor_flatten__()
    tensors = {name: getattr(value, name) for name in names}
    return tensors, {
        "class": type(value).__name__,
        "tensors": list(names),
        "attributes": [_plain(one) for one in attributes],
    }


def unpack(facts: Mapping[str, Any], read: Callable[[str], Tensor]) -> Tensor:
    """A state from the values of a checkpoint.

    Args:
        facts: What `pack` returned beside the tensors.
        read: (name) → the tensor of that name.

    Raises:
        CheckpointError: the checkpoint has a state of another class.
    """
    home = _CLASSES.get(facts["class"])
    if home is None:
        raise CheckpointError(
            f"This checkpoint has optimizer states of class {facts['class']!r}; known are "
            f"{', '.join(_CLASSES)}. Restore it with the version of fxtrain that saved it."
        )
    kind = getattr(importlib.import_module(home), facts["class"])
    tensors = {name: read(name) for name in facts["tensors"]}
    return kind.__tensor_unflatten__(tensors, [_value(one) for one in facts["attributes"]])


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _value(plain: Any) -> Any:
    if isinstance(plain, str):
        return getattr(torch, plain.removeprefix("torch."))
    return torch.Size(plain) if isinstance(plain, list) else plain
