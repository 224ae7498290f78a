"""The tensors of a model as a plan with quantised weights or layers in float8 holds them."""

from typing import Any

import attrs
from torch import nn

from fxtrain.models.memory_estimates import Training, training
from fxtrain.models.weight_list import Weight, Weights, build_on_meta, cache_of, weights_of
from fxtrain.precision import (
    quantize_on_meta,
    quantized_layers,
    recipe_targets,
)
from fxtrain.state import Plan

__all__ = ["PlannedWeights", "plan_weights"]


@attrs.frozen(kw_only=True)
class PlannedWeights:
    """A model under a plan.

    Attributes:
        weights: Its tensors. Those of quantised weights neither train nor change their format.
        converted: Weights of layers that compute in the format of a recipe, for which autocast
            makes no copies.
        keep: Whether trained parameters keep their dtype.
    """

    weights: Weights
    converted: tuple[str, ...]
    keep: bool = False

    def training(self, *, precision: str, optimizer: str, sharding: str, ranks: int) -> Training:
        """Bytes on each rank during training, as `memory_estimates.training`."""
        options: dict[str, Any] = {
            "precision": precision,
            "optimizer": optimizer,
            "sharding": sharding,
            "ranks": ranks,
            "keep": self.keep,
        }
        found = training(self.weights, **options)
        if not self.converted:
            return found
        others = [one for one in self.weights.tensors if one.name not in self.converted]
        rest = attrs.evolve(self.weights, tensors=tuple(others))
        working = training(rest, **options).working
        largest = max(one.numel for one in self.weights.tensors if one.name in self.converted)
        return attrs.evolve(found, working=working + largest)  # one weight at a time, one byte each


def plan_weights(source: str, plan: Plan) -> PlannedWeights:
    """List the tensors of a model as a plan holds them, without reading values.

    Args:
        source: A transformers config.json or a folder with one, `module:function`, or a timm
            model name: files without code do not tell which tensors belong to linear layers.

    Effects:
        Imports and runs that code, on the meta device, and imports the library of the format.

    Raises:
        PlanError: the source is none of these, or the plan does not fit the model.
        MissingPackageError: the library of the format is not installed.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.models.planned_weights import plan_weights
        >>> plan_weights("torch.nn:PReLU", fx.Plan()).weights.tensors[0].nbytes
        4
    """
    module: nn.Module = build_on_meta(source)
    record = plan.quantize
    if record is not None:
        frozen = any(not one.requires_grad for one in module.parameters())
        quantize_on_meta(module, record, trains=frozen)
    recipe = plan.precision.recipe
    converted = () if recipe is None else recipe_targets(module, recipe).names
    config: Any = getattr(module, "config", None)
    known = config.to_dict() if hasattr(config, "to_dict") else {}
    return PlannedWeights(
        weights=Weights(source=source, tensors=_tensors(module), cache=cache_of(known)),
        converted=tuple(f"{name}.weight" if name else "weight" for name in converted),
        keep=plan.precision.params == "keep" or plan.precision.compute == "fp32",
    )


def _tensors(module: nn.Module) -> tuple[Weight, ...]:
    hidden = {id(part.weight) for _, part, _ in quantized_layers(module)}
    own = (*module.named_parameters(), *module.named_buffers())
    plain = weights_of((name, tensor) for name, tensor in own if id(tensor) not in hidden)
    packed = tuple(
        Weight(
            name=f"{name}.{key}" if name else key,
            # What the layer stands for, once; not how many numbers its format takes.
            numel=_elements(part) if index == 0 else 0,
            nbytes=tensor.numel() * tensor.element_size(),
            trained=False,
            floating=False,
        )
        for name, part, library in quantized_layers(module)
        for index, (key, tensor) in enumerate(library.tensors(part).items())
    )
    return plain + packed


def _elements(part: Any) -> int:
    return part.in_features * part.out_features
