"""Quantised weights whose rows are split over ranks: which can be, and as what torch sees them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fxtrain.precision.library import Library, is_sharded
from fxtrain.precision.plain_tensors import quantized_layers
from fxtrain.precision.quantizing import library_of
from fxtrain.state import Quantize

__all__ = ["companions", "hold_as_parameters", "sharding_problem"]


def sharding_problem(module: nn.Module, record: Quantize | None) -> str | None:
    """Why the quantised weights of a model cannot be split over ranks; None if they can.

    Args:
        record: How the model will be quantised, if it is not yet.
    """
    layers = list(quantized_layers(module))
    libraries = {library for _, _, library in layers}
    if record is not None:
        libraries.add(library_of(record))
    whole = sorted(one.name for one in libraries if one.split is None)
    if whole:
        return (
            f"tensors of {whole[0]} cannot be split over ranks. Use fx.Bnb4() or fx.Bnb8(), or "
            f"DDP() with a replica of them on each rank"
        )
    foreign = [name for name, part, _ in layers if not type(part).__module__.startswith("fxtrain")]
    if foreign:
        return (
            f"{foreign[0]} was quantised by another library, whose layers expect a weight that "
            f"is not split. Load it with fx.load_model(folder, net), where net has plain layers"
        )
    if any(one.is_meta for one in (*module.parameters(), *module.buffers())):
        return (
            "the model is on the meta device. Fill it before fx.wrap, with "
            "fx.load_model(folder, net, quantize=...)"
        )
    return None


def hold_as_parameters(module: nn.Module, device: torch.device) -> Callable[[], None]:
    """Hold quantised weights as plain parameters of bytes, and their scales on a device.

    torch then splits and gathers the bytes like those of any other parameter, and the layers
    compute with what was gathered.

    Returns:
        What gives the layers parameters of their library again, with the values of then; those
        that are sharded then stay as they are.
    """
    changed: list[tuple[nn.Module, Library]] = []
    for _, part, library in quantized_layers(module):
        assert library.split is not None
        library.split(part, device)
        changed.append((part, library))

    def undo() -> None:
        for part, library in changed:
            if not is_sharded(part.weight):
                library.put(part, library.tensors(part))

    return undo


def companions(module: nn.Module) -> list[Tensor]:
    """The scales and tables of quantised weights, which every rank holds in full."""
    return [
        tensor
        for _, part, library in quantized_layers(module)
        for name, tensor in library.tensors(part).items()
        if name != "weight"
    ]
