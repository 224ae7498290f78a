"""Estimate the memory that a model needs from its tensors, by arithmetic only."""

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import attrs
import torch

from fxtrain._optional import optional
from fxtrain.big.measuring import (
    TensorSize,
    cache_of_model,
    config_beside,
    layer_of,
    open_model,
    tensors_of,
    tensors_of_files,
)
from fxtrain.errors import PlanError
from fxtrain.models.code_models import KvCache, build_on_meta, cache_of, read_json
from fxtrain.ops.tensor_bytes import DTYPE_NAMES
from fxtrain.precision.quantizing import quantize_layers
from fxtrain.precision.recipe_layers import recipe_targets
from fxtrain.state import FileTensor, Plan

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
BYTES: dict[str, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "int4": 0.5}


@attrs.frozen(kw_only=True)
class Weights:
    """The tensors of a model, for memory estimates.

    Attributes:
        source: Where it was read from.
        tensors: Parameters and buffers; shared ones are listed once.
        cache: Shape of its key-value cache; None if unknown.
        keep: Whether trained parameters, their gradients and optimizer states keep the dtype of the
            model in training, as `Precision(params="keep")` says.
        converted: Names of weights whose layers compute in the format of a recipe, for which
            autocast makes no copies.
    """

    source: str
    tensors: tuple[TensorSize, ...]
    cache: KvCache | None = None
    keep: bool = False
    converted: frozenset[str] = frozenset()


def read_weights(source: str, plan: Plan | None = None) -> Weights:
    """List the tensors of a model, without downloading it or reading values.

    Args:
        source: A model file that `load_model` reads, an index, or a folder with either; a
            transformers config.json or a folder with one; `module:function`, called with the meta
            device as torch's default; or a timm model name.
        plan: List the tensors as this plan holds them. The source then has to be a config, a
            function or a name: files without code do not tell which tensors belong to linear
            layers. Quantized weights neither train nor change their format.

    Effects:
        Reads file headers, or imports and runs code on the meta device, and imports the library of
        the plan's format.

    Raises:
        PlanError: the source is none of these, or the plan does not fit the model.
        CheckpointError: a file is damaged, or no model file.
        MissingPackageError: transformers, timm or the library of the format is needed.
    """
    module, stored = (
        open_model(source, build=False) if plan is None else (build_on_meta(source), {})
    )
    if module is None:
        config = config_beside(Path(source))
        cache = cache_of(read_json(config)) if config.is_file() else None
        return Weights(source=source, tensors=tuple(tensors_of_files(stored)), cache=cache)
    converted: frozenset[str] = frozenset()
    if plan is not None:
        if plan.quantize is not None:
            frozen = any(not parameter.requires_grad for parameter in module.parameters())
            quantize_layers(module, plan.quantize, torch.device("meta"), trains=frozen)
        if (recipe := plan.precision.recipe) is not None:
            names, _ = recipe_targets(module, recipe)
            converted = frozenset(f"{name}.weight".lstrip(".") for name in names)
    once: dict[Any, TensorSize] = {}
    for tensor in tensors_of(module):
        once.setdefault(tensor.key, tensor)
    return Weights(
        source=source,
        tensors=tuple(once.values()),
        cache=cache_of_model(module),
        keep=plan is not None
        and (plan.precision.params == "keep" or plan.precision.compute == "fp32"),
        converted=converted,
    )


def measure_weights(weights: Weights) -> dict[str, Any]:
    """Elements and bytes of a model, in total and of its largest layer.

    A layer is an item of a numbered sequence, such as `model.layers.7`, or otherwise the module
    that a tensor belongs to.

    Returns:
        Elements of all tensors, and of those with a gradient; bytes as stored; name, elements and
        bytes of the largest layer.

    Raises:
        PlanError: the model has no tensors.
    """
    layers: dict[str, list[TensorSize]] = {}
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
        "working": _working(weights, BYTES[precision], full=level < 3 or ranks == 1),
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
    return total, weights.cache and weights.cache.nbytes(max(2, each), batch * tokens)


def _working(weights: Weights, each: float, *, full: bool) -> float:
    """Bytes of copies for computation: autocast keeps those of parameters until forward ends."""
    floats = [tensor for tensor in weights.tensors if tensor.floating]
    # Of layers that compute as a recipe says, one weight at a time, one byte each.
    largest = max((t.numel for t in floats if t.name in weights.converted), default=0)
    copied = [tensor for tensor in floats if tensor.name not in weights.converted]
    if full:
        return largest + (0.0 if each == 4 else sum(tensor.numel for tensor in copied) * each)
    layers: Counter[str] = Counter()
    for tensor in copied:
        layers[layer_of(tensor.name)] += tensor.numel
    return largest + 2 * max(layers.values(), default=0) * each


def read_hub(name: str) -> Weights:
    """List the tensors of a model on the hub, named as OWNER/NAME.

    Effects:
        Downloads the headers of its safetensors files and its config.json: kilobytes, and no
        tensor.

    Raises:
        PlanError: the hub cannot be reached, or has no safetensors files of this model.
        MissingPackageError: huggingface_hub is needed.
    """
    hub = optional("huggingface_hub", extra="models", needed_by=f"{name} with --download")
    try:
        files = hub.get_safetensors_metadata(name).files_metadata.values()
    except Exception as error:  # from the hub, its HTTP library, or the system
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise PlanError(f"{name} could not be fetched from the hub: {reason}") from error
    stored = {
        name: FileTensor(name=name, dtype=DTYPE_NAMES[about.dtype], shape=tuple(about.shape))
        for file in files
        for name, about in file.tensors.items()
    }
    try:
        config = read_json(Path(hub.hf_hub_download(name, "config.json")))
    except hub.errors.EntryNotFoundError:
        config = {}
    return Weights(source=name, tensors=tuple(tensors_of_files(stored)), cache=cache_of(config))
