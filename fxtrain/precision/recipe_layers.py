"""Linear layers that compute as a recipe says: chosen, converted in place, and converted back.

A converted layer is the user's module with another class, so that its parameters, names, hooks and
the references to it stay as they are.
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from fxtrain.errors import PlanError
from fxtrain.precision.library import LayerFormat
from fxtrain.precision.targets import Targets, all_named, choose_linears, nothing_left
from fxtrain.precision.torchao_recipes import FLOAT8_LAYERS, MX_LAYERS
from fxtrain.precision.transformer_engine import TE_LAYERS
from fxtrain.state import MX, TE, Float8, Recipe

_BY_RECORD: Mapping[type, LayerFormat] = {Float8: FLOAT8_LAYERS, MX: MX_LAYERS, TE: TE_LAYERS}


@attrs.frozen(kw_only=True)
class Converted:
    """What `convert_layers` changed.

    Attributes:
        layers: Names of the converted layers.
        skipped: For each other linear layer, why it is skipped.
        undo: Gives the layers their classes and attributes back.
    """

    layers: tuple[str, ...]
    skipped: Mapping[str, str]
    undo: Callable[[], None] = attrs.field(repr=False)


def recipe_targets(module: nn.Module, recipe: Recipe) -> Targets:
    """The linear layers that a recipe converts, and why it skips the others. Imports nothing.

    Raises:
        PlanError: a pattern or class name matches nothing, or no layer is left.

    Example:
        >>> import torch
        >>> import fxtrain as fx
        >>> from fxtrain.precision import recipe_targets
        >>> net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 2))
        >>> recipe_targets(net, fx.Float8(head=True))
        Targets(names=('0',), skipped={'1': 'its size (32, 2) is below min_features=16'})
    """
    unit = _BY_RECORD[type(recipe)].multiple(recipe)

    def reason(part: nn.Linear) -> str | None:
        sizes = (part.in_features, part.out_features)
        if min(sizes) < recipe.min_features:
            return f"its size {sizes} is below min_features={recipe.min_features}"
        if any(size % unit for size in sizes):
            return f"its size {sizes} is not divisible by {unit}"
        return None

    found = choose_linears(module, recipe, reason)
    if not found.names and not all_named(found.skipped, recipe):
        raise PlanError(_nothing_left(module, recipe, found.skipped))
    return found


def convert_layers(
    module: nn.Module, recipe: Recipe, device: torch.device, *, seed: int = 0, checked: bool = True
) -> Converted:
    """Convert the linear layers of a model in place, as a recipe says.

    Args:
        device: Where the model will compute.
        seed: For recipes that draw random numbers: the same on every rank.
        checked: Whether to refuse a device that cannot compute in the format.

    Effects:
        Changes the class of the layers, and adds the attributes that it needs. Parameters,
        buffers and hooks stay as they are.

    Raises:
        PlanError: as `recipe_targets`, or the device cannot compute in this format. The model
            is as it was, then and after any other error.
        MissingPackageError: the library is not installed.

    Example:
        >>> import torch
        >>> import fxtrain as fx
        >>> from fxtrain.precision import convert_layers
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
        >>> recipe = fx.Float8(emulate=True)
        >>> convert_layers(net, recipe, torch.device("cpu")).layers
        ('0',)
    """
    how = _BY_RECORD[type(recipe)]
    if checked and (problem := how.check(recipe, device)) is not None:
        raise PlanError(f"Plan(precision=fx.Precision(compute='fp8', ...)): {problem}")
    targets = recipe_targets(module, recipe)
    names = (*targets.names, *how.others(module, recipe))
    parts = [module.get_submodule(name) for name in names]
    made = [how.like(part, recipe, device, seed + index) for index, part in enumerate(parts)]
    undos = [_become(part, like) for part, like in zip(parts, made, strict=True)]

    def undo() -> None:
        for one in undos:
            one()

    return Converted(layers=names, skipped=targets.skipped, undo=undo)


def _become(part: nn.Module, like: nn.Module) -> Callable[[], None]:
    """Give a module the class of another, and the attributes that it lacks."""
    before = type(part)
    added = {name: value for name, value in vars(like).items() if name not in vars(part)}
    part.__class__ = type(like)
    vars(part).update(added)

    def undo() -> None:
        part.__class__ = before
        for name in added:
            vars(part).pop(name, None)

    return undo


def _nothing_left(module: nn.Module, recipe: Any, skipped: Mapping[str, str]) -> str:
    call = f"Precision(recipe=fx.{type(recipe).__name__}(...))"
    return nothing_left(call, "converts", module, skipped, "precision='bf16'")
