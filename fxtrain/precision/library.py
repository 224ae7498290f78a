"""What a library of quantized layers has to do, as a record of functions."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain.state import Quantize

# Tensors of one layer, by their names below the layer's.
Tensors = Mapping[str, Tensor]


@attrs.frozen(kw_only=True, eq=False)
class Library:
    """How one library holds quantized weights.

    Attributes:
        name: Its package.
        owns: (module) → whether this is a layer of it that is quantized.
        check: (record, device) → why the device cannot compute in a format, or None.
        quantize: (layer, record) → a new layer, on the device of the old one; also on meta.
        tensors: (layer) → the live tensors of its weight.
        put: (layer, tensors) → None: replaces them by others, on any device.
        facts: (layer) → settings of its weight that a file stores beside the tensors.
        build: (layer, tensors, facts, record) → a quantized layer for a plain one.
        settings: (layer) → the fields of a record that it determines, with its kind.
        split: (layer, device) → None: makes its weight a plain parameter, whose rows can be split
            over ranks, and moves its other tensors to the device. None if the library cannot
            compute with such a weight.
    """

    name: str
    owns: Callable[[nn.Module], bool]
    check: Callable[[Any, torch.device], str | None]
    quantize: Callable[[nn.Linear, Any], nn.Module]
    tensors: Callable[[nn.Module], dict[str, Tensor]]
    put: Callable[[nn.Module, Tensors], None]
    facts: Callable[[nn.Module], dict[str, Any]]
    build: Callable[[nn.Linear, Tensors, Mapping[str, Any], Quantize | None], nn.Module]
    settings: Callable[[nn.Module], dict[str, Any]]
    split: Callable[[Any, torch.device], None] | None = None


def linear_like(part: nn.Linear, weight: Tensor | None = None) -> nn.Linear:
    """A plain layer of the same size and bias, with a frozen `weight` or one on the meta device."""
    layer = nn.Linear(part.in_features, part.out_features, bias=False, device="meta")
    if weight is not None:
        layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = part.bias
    return layer.train(part.training)


@contextlib.contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Around an import: loggers of these names report errors only.

    The libraries report kernels for other devices that they do not find.
    """
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
