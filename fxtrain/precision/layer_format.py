"""What a library of layers for training in small formats has to do, as a record of functions."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn


def _none(module: nn.Module, recipe: Any) -> tuple[str, ...]:
    return ()


@attrs.frozen(kw_only=True, eq=False)
class LayerFormat:
    """How one kind of recipe converts layers.

    Attributes:
        check: (recipe, device) → why the device cannot compute in the format, or None.
        multiple: (recipe) → what must divide input and output features.
        like: (layer, recipe, device, seed) → a layer of the library's class, whose own attributes
            a converted layer takes; its parameters are not used.
        others: (module, recipe) → names of layers to convert that are not linear.
    """

    check: Callable[[Any, torch.device], str | None]
    multiple: Callable[[Any], int]
    like: Callable[[Any, Any, torch.device, int], nn.Module]
    others: Callable[[nn.Module, Any], tuple[str, ...]] = _none
