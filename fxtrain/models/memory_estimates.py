"""Estimate the memory that a model needs from its tensors, by arithmetic only."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import attrs
from torch import nn

from fxtrain.errors import PlanError
from fxtrain.models.weight_list import (
    KvCache,
    Weight,
    Weights,
    build_on_meta,
    weights_of,
)
from fxtrain.precision.plain_tensors import quantized_layers
from fxtrain.precision.quantizing import quantize_on_meta
from fxtrain.precision.recipe_layers import recipe_targets
from fxtrain.state import Plan

# Bytes of optimizer state per trained element, in fp32.
OPTIMIZERS: dict[str, float] = {
    "none": 0,
    "sgd": 0,
    "momentum": 4,
    "adagrad": 4,
    "lion": 4,
    "rmsprop": 4,
    "adam": 8,
    "adamw": 8,
    "amsgrad": 12,
    "adamw-8bit": 2,
}
# What is sharded; each level includes those before it.
SHARDING = ("none", "optimizer", "gradients", "parameters")
BYTES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "int4": 0.5, "int2": 0.25}


def estimate(weights: Weights) -> dict[str, Any]:
    """Elements and bytes of a model, in total and of its largest layer.

    A layer is an item of a numbered sequence, such as `model.layers.7`, or otherwise the module
    that a tensor belongs to.

    Returns:
        Elements of all tensors, and of those with a gradient; bytes as stored; name, elements and
        bytes of the largest layer.

    Raises:
        PlanError: the model has no tensors.
    """
    layers: dict[str, list[Weight]] = {}
    for tensor in weights.tensors:
        layers.setdefault(layer_of(tensor.name), []).append(tensor)
    if not layers:
        raise PlanError(f"{weights.source} contains no tensors.")
    name, largest = max(layers.items(), key=lambda layer: sum(weight.nbytes for weight in layer[1]))
    return {
        "parameters": sum(weight.numel for weight in weights.tensors),
        "trained": sum(weight.numel for weight in weights.tensors if weight.trained),
        "stored_bytes": sum(weight.nbytes for weight in weights.tensors),
        "largest_layer": {
            "name": name,
            "parameters": sum(weight.numel for weight in largest),
            "bytes": sum(weight.nbytes for weight in largest),
        },
    }


def training(
    weights: Weights,
    *,
    optimizer: str = "adamw",
    precision: Literal["fp32", "bf16", "fp16"] = "bf16",
    sharding: str = "none",
    ranks: int = 1,
) -> dict[str, float]:
    """Bytes on each rank during training under autocast, without activations.

    Trained parameters are in fp32, unless `weights.keep` is set.

    Args:
        weights: The model.
        optimizer: One of OPTIMIZERS.
        precision: Dtype of autocast.
        sharding: One of SHARDING.
        ranks: Ranks to shard over.

    Returns:
        Bytes of parameters, of their gradients, and of optimizer states; "working", copies for
        computation: autocast's in half precision or, if parameters are sharded, the full weights of
        the largest layer and of the next one; "buffers", tensors that are stored but not trained.
    """
    level, per_entry = SHARDING.index(sharding), OPTIMIZERS[optimizer]
    trained = sum(
        weight.nbytes if weights.keep else 4 * weight.numel
        for weight in weights.tensors
        if weight.trained
    )
    frozen = sum(
        weight.nbytes for weight in weights.tensors if weight.floating and not weight.trained
    )
    other = sum(weight.nbytes for weight in weights.tensors if not weight.floating)
    parts = [1 / ranks if level >= least else 1.0 for least in (1, 2, 3)]
    return {
        "parameters": float(trained + frozen) * parts[2],
        "gradients": trained * parts[1],
        "optimizer": trained / 4 * per_entry * parts[0],
        "working": _working(weights.tensors, BYTES[precision], full=level < 3 or ranks == 1),
        "buffers": float(other),
    }


def inference(
    weights: Weights, *, precision: str = "bf16", batch: int = 1, tokens: int = 4096
) -> tuple[float, float | None]:
    """Bytes of the weights and of the key-value cache.

    Args:
        weights: The model.
        precision: Precision of floating-point weights, one of BYTES. A cache element uses at
            least 2 bytes.
        batch: Number of sequences.
        tokens: Length of each sequence, including the prompt.

    Returns:
        Bytes of the weights; bytes of the cache, or None if its shape is unknown.
    """
    each = BYTES[precision]
    total = sum(
        weight.numel * each if weight.floating else weight.nbytes for weight in weights.tensors
    )
    return total, weights.cache and cache_bytes(weights.cache, max(2, each), batch * tokens)


def cache_bytes(cache: KvCache, each: float, tokens: int) -> float:
    """Bytes of the keys and values of this many tokens."""
    return 2 * cache.layers * cache.heads * cache.head_dim * each * tokens


def _working(tensors: Iterable[Weight], each: float, *, full: bool) -> float:
    """Bytes of copies for computation: autocast keeps those of parameters until forward ends."""
    floats = [tensor for tensor in tensors if tensor.floating]
    # Of layers that compute as a recipe says, one weight at a time, one byte each.
    largest = max((tensor.numel for tensor in floats if tensor.converted), default=0)
    copied = [tensor for tensor in floats if not tensor.converted]
    if full:
        return largest + (0.0 if each == 4 else sum(tensor.numel for tensor in copied) * each)
    layers: Counter[str] = Counter()
    for tensor in copied:
        layers[layer_of(tensor.name)] += tensor.numel
    return largest + 2 * max(layers.values(), default=0) * each


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: an item of a numbered sequence, or else its module."""
    numbered = re.match(r"(.*?(?:^|\.)\d+)\.", name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


def plan_weights(source: str, plan: Plan) -> Weights:
    """List the tensors of a model as a plan holds them, without reading values.

    Quantised weights neither train nor change their format.

    Args:
        source: A transformers config.json or a folder with one, `module:function`, or a timm
            model name: files without code do not tell which tensors belong to linear layers.

    Effects:
        Imports and runs that code, on the meta device, and imports the library of the format.

    Raises:
        PlanError: the source is none of these, or the plan does not fit the model.
        MissingPackageError: the library of the format is not installed.
    """
    module: nn.Module = build_on_meta(source)
    record = plan.quantize
    if record is not None:
        frozen = any(not parameter.requires_grad for parameter in module.parameters())
        quantize_on_meta(module, record, trains=frozen)
    recipe = plan.precision.recipe
    converted = () if recipe is None else recipe_targets(module, recipe).names
    names = {f"{name}.weight" if name else "weight" for name in converted}
    weights = weights_of(module, source)
    return attrs.evolve(
        weights,
        tensors=tuple(
            attrs.evolve(tensor, converted=tensor.name in names)
            for tensor in (*_plain(module, weights.tensors), *_packed(module))
        ),
        keep=plan.precision.params == "keep" or plan.precision.compute == "fp32",
    )


def _plain(module: nn.Module, tensors: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Tensors that belong to no quantised weight."""
    packed = {id(part.weight) for _, part, _ in quantized_layers(module)}
    own = (*module.named_parameters(), *module.named_buffers())
    hidden = {name for name, tensor in own if id(tensor) in packed}
    return tuple(tensor for tensor in tensors if tensor.name not in hidden)


def _packed(module: nn.Module) -> Iterator[Weight]:
    for name, part, library in quantized_layers(module):
        for index, (key, tensor) in enumerate(library.tensors(part).items()):
            yield Weight(
                name=f"{name}.{key}" if name else key,
                # What the layer stands for, once; not how many numbers its format takes.
                numel=part.in_features * part.out_features if index == 0 else 0,  # pyright: ignore
                nbytes=tensor.numel() * tensor.element_size(),
                trained=False,
                floating=False,
            )
