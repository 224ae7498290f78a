"""From the tensors of a model to the memory that it needs: arithmetic only."""

import re
from collections.abc import Iterable
from typing import Literal

import attrs

from fxtrain._errors import PlanError
from fxtrain.models.weight_list import KvCache, Weight, Weights

__all__ = [
    "BYTES", "OPTIMIZERS", "SHARDING", "Estimate", "Training", "estimate", "inference", "training",
]  # fmt: skip

# Bytes that an optimizer keeps per trained entry, with its state in fp32 where it has one.
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
# What is split over ranks: optimizer state, then gradients too, then parameters too.
SHARDING = ("none", "optimizer", "gradients", "parameters")
BYTES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "int4": 0.5}


@attrs.frozen(kw_only=True)
class Training:
    """Bytes on each rank while training, without activations.

    Attributes:
        parameters: In the precision that the optimizer updates.
        gradients: Of all that is trained.
        optimizer: What the optimizer keeps.
        working: Copies to compute with: autocast's in half precision, or the largest layer
            as one piece where parameters are split, and the next one beside it.
        buffers: What is stored and not trained; equal on every rank.
    """

    parameters: float
    gradients: float
    optimizer: float
    working: float
    buffers: float

    @property
    def total(self) -> float:
        """All of it."""
        return sum(attrs.astuple(self))


@attrs.frozen(kw_only=True)
class Estimate:
    """What a model is, before anything is done with it.

    Attributes:
        numel: Entries of all tensors.
        trained: Entries with a gradient.
        nbytes: Bytes as stored.
        largest: Name of the largest layer.
        largest_numel: Its entries.
        largest_nbytes: Its bytes as stored.
    """

    numel: int
    trained: int
    nbytes: int
    largest: str
    largest_numel: int
    largest_nbytes: int


def estimate(weights: Weights) -> Estimate:
    """Totals and the largest layer.

    A layer is one of a numbered sequence, such as `model.layers.7`, or else the module that a
    tensor belongs to.

    Raises:
        PlanError: there are no tensors.

    Example:
        >>> from fxtrain.models.memory_estimates import estimate
        >>> from fxtrain.models.weight_list import read_weights
        >>> estimate(read_weights("torch.nn:PReLU")).numel
        1
    """
    layers: dict[str, list[Weight]] = {}
    for tensor in weights.tensors:
        layers.setdefault(_layer(tensor.name), []).append(tensor)
    if not layers:
        raise PlanError(f"{weights.source} holds no tensors.")
    name, largest = max(layers.items(), key=lambda layer: sum(one.nbytes for one in layer[1]))
    return Estimate(
        numel=sum(one.numel for one in weights.tensors),
        trained=sum(one.numel for one in weights.tensors if one.trained),
        nbytes=sum(one.nbytes for one in weights.tensors),
        largest=name,
        largest_numel=sum(one.numel for one in largest),
        largest_nbytes=sum(one.nbytes for one in largest),
    )


def training(
    weights: Weights,
    *,
    optimizer: str = "adamw",
    precision: Literal["fp32", "bf16", "fp16"] = "bf16",
    sharding: str = "none",
    ranks: int = 1,
) -> Training:
    """Bytes on each rank while training with fp32 parameters under autocast.

    Example:
        >>> from fxtrain.models.memory_estimates import training
        >>> from fxtrain.models.weight_list import read_weights
        >>> training(read_weights("torch.nn:PReLU"), precision="fp32").total
        16.0
    """
    level = _choice("sharding", sharding, SHARDING)
    per_entry = list(OPTIMIZERS.values())[_choice("optimizer", optimizer, tuple(OPTIMIZERS))]
    _choice("precision", precision, ("fp32", "bf16", "fp16"))
    if ranks < 1:
        raise PlanError(f"ranks={ranks}: choose 1 or more.")
    trained = sum(one.numel for one in weights.tensors if one.trained)
    frozen = sum(one.numel for one in weights.tensors if one.floating and not one.trained)
    other = sum(one.nbytes for one in weights.tensors if not one.floating)
    parts = [1 / ranks if level >= least else 1.0 for least in (1, 2, 3)]
    return Training(
        parameters=(trained + frozen) * 4 * parts[2],
        gradients=trained * 4 * parts[1],
        optimizer=trained * per_entry * parts[0],
        working=_working(weights.tensors, BYTES[precision], whole=level < 3 or ranks == 1),
        buffers=float(other),
    )


def inference(
    weights: Weights, *, precision: str = "bf16", batch: int = 1, tokens: int = 4096
) -> tuple[float, float | None]:
    """Bytes of the weights and of the cache of keys and values.

    Args:
        weights: The model.
        precision: Of floating weights, one of BYTES; a cache is kept in 2 bytes or more.
        batch: Sequences at once.
        tokens: Length of each, the prompt included.

    Returns:
        Bytes of weights; bytes of the cache, or None where its shape is not known.

    Example:
        >>> from fxtrain.models.memory_estimates import inference
        >>> from fxtrain.models.weight_list import read_weights
        >>> inference(read_weights("torch.nn:PReLU"), precision="bf16")
        (2, None)
    """
    _choice("precision", precision, tuple(BYTES))
    for name, value in (("batch", batch), ("tokens", tokens)):
        if value < 1:
            raise PlanError(f"{name}={value}: choose 1 or more.")
    each = BYTES[precision]
    held = sum(one.numel * each if one.floating else one.nbytes for one in weights.tensors)
    return held, weights.cache and cache_bytes(weights.cache, max(2, each), batch * tokens)


def cache_bytes(cache: KvCache, each: float, tokens: int) -> float:
    """Keys and values of so many tokens."""
    return 2 * cache.layers * cache.heads * cache.head_dim * each * tokens


def _working(tensors: Iterable[Weight], each: float, *, whole: bool) -> float:
    """Autocast keeps its copies of parameters to the end of forward; fp32 needs none."""
    floats = [one for one in tensors if one.floating]
    if whole:
        return 0.0 if each == 4 else sum(one.numel for one in floats) * each
    layers: dict[str, int] = {}
    for one in floats:
        layers[_layer(one.name)] = layers.get(_layer(one.name), 0) + one.numel
    return 2 * max(layers.values(), default=0) * each


def _layer(name: str) -> str:
    numbered = re.match(r"(.*?(?:^|\.)\d+)\.", name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


def _choice(what: str, asked: str, known: tuple[str, ...]) -> int:
    if asked not in known:
        raise PlanError(f"{what}={asked!r}: choose one of {', '.join(known)}.")
    return known.index(asked)
