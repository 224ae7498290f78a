"""The tensors of a model by name, where those of quantised weights are plain ones."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain.precision.bnb_layers import BNB4, BNB8
from fxtrain.precision.library import Library
from fxtrain.precision.torchao_layers import TORCHAO

LIBRARIES = (BNB4, BNB8, TORCHAO)


def quantized_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module, Library]]:
    """The quantised layers of a model by name, each with its library.

    Layers are known by their classes and tensors, so that models that another program quantised
    are included. No library is imported.
    """
    for name, part in module.named_modules():
        library = next((known for known in LIBRARIES if known.owns(part)), None)
        if library is not None:
            yield name, part, library


def is_quantized(module: nn.Module) -> bool:
    """Whether a model has a quantised layer."""
    return next(quantized_layers(module), None) is not None


def quantized_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The live tensors of all quantised weights, by name."""
    return {
        _join(name, key): tensor
        for name, part, library in quantized_layers(module)
        for key, tensor in library.tensors(part).items()
    }


def quantized_facts(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Format and settings of each quantised weight, beside its tensors, by layer."""
    return {
        name: {"format": library.format(part), **library.facts(part)}
        for name, part, library in quantized_layers(module)
    }


def stored_tensors(module: nn.Module) -> dict[str, Any]:
    """The state dict of a model, with plain, live tensors for quantised weights."""
    stored: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    for name, part, library in quantized_layers(module):
        bias, prefix = _join(name, "bias"), _join(name, "")
        for key in [key for key in stored if key.startswith(prefix) and key != bias]:
            del stored[key]
        stored |= {_join(name, key): tensor for key, tensor in library.tensors(part).items()}
    return stored


def stream_later(module: nn.Module, device: torch.device) -> Callable[[], None]:
    """Prepare quantised weights for a strategy that allocates their tensors one by one.

    Weights on the meta device move to `device`, without memory.

    Returns:
        A function that puts them back onto the meta device.
    """
    before: list[tuple[Library, nn.Module, dict[str, Tensor]]] = []
    for _, part, library in quantized_layers(module):
        vars(part)["keeps_copy"] = False  # of weights in bitsandbytes' layout for CPUs
        tensors = library.tensors(part)
        if any(tensor.is_meta for tensor in tensors.values()):
            before.append((library, part, tensors))
            library.put(part, {name: _unfilled(tensor, device) for name, tensor in tensors.items()})

    def undo() -> None:
        for library, part, tensors in before:
            library.put(part, tensors)

    return undo


def has_no_memory(tensor: Tensor) -> bool:
    """Whether a tensor has no values: on the meta device, or prepared by `stream_later`."""
    return tensor.is_meta or (tensor.numel() > 0 and not tensor.untyped_storage().nbytes())


def live_tensors(part: nn.Module) -> dict[str, Tensor]:
    """The tensor objects of a quantised weight, whose `.data` a strategy may replace.

    None of any other module.
    """
    library = next((known for known in LIBRARIES if known.owns(part)), None)
    tensors = {} if library is None else library.tensors(part)
    if "weight" in tensors:  # bitsandbytes' parameter, of which this is another object
        tensors["weight"] = part.get_parameter("weight")
    return tensors


def _unfilled(like: Tensor, device: torch.device) -> Tensor:
    tensor = torch.empty_like(like, device=device)
    tensor.untyped_storage().resize_(0)
    return tensor


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give quantised weights on the meta device memory, without values."""
    for _, part, library in quantized_layers(module):
        tensors = library.tensors(part)
        if any(tensor.is_meta for tensor in tensors.values()):
            empty = {key: torch.empty_like(like, device=device) for key, like in tensors.items()}
            library.put(part, empty)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
