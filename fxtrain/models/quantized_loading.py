"""Quantized layers while a model is loaded: those of the source, and those to make."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain._reading import read_file
from fxtrain._record import shown
from fxtrain.errors import CheckpointError, FxError
from fxtrain.models.safetensors_files import parse_json_object
from fxtrain.models.stored_layers import StoredLayer, record_of, shape_problem
from fxtrain.models.tensor_sources import TensorSource, WeightSource, open_source
from fxtrain.precision.library import linear_like
from fxtrain.precision.quantizing import (
    converted_to_fp32,
    difference,
    is_quantized,
    library_of,
    planned_layers,
    put_layers,
    quantized_layers,
    weight_format,
)
from fxtrain.state import FileTensor, Quantize, TensorIndex, Wrapped

_CONV1D = " Read this model with from_pretrained of transformers, and pass it to fx.wrap."
_LARGEST_CONFIG = 10_000_000  # bytes


def prepare_layers(
    source: Any,
    opened: TensorSource,
    model: Any,
    module: nn.Module,
    record: Quantize | None,
    device: torch.device,
    undo: contextlib.ExitStack,
) -> tuple[dict[str, str], frozenset[str]]:
    """Make a model ready for the quantized layers of a source, or for being quantized.

    Layers that are quantized in the source are replaced by such layers without values; `undo` gets
    the functions that restore the model. Returns the layers to quantize once their weights are
    read, by the names of these weights; and the names of tensors that are converted to fp32.
    """
    if is_quantized(module):
        _check_quantized(opened, record, module)
        return {}, frozenset()
    if not opened.layers and record is None:
        return {}, frozenset()
    if isinstance(model, Wrapped):
        raise CheckpointError(
            "load_model: layers can be quantized before fx.wrap only, and this model is wrapped. "
            "Load into the module first, and wrap it then."
        )
    weights: dict[str, str] = {}
    if opened.layers:
        undo.callback(put_stored_layers(source, opened, module, record))
    elif record is not None:
        names = planned_layers(module, record, device, trains=False)
        weights = {f"{name}.weight": name for name in names}
    if record is None:
        return {}, frozenset()
    before = {name: tensor.dtype for name, tensor in module.named_parameters()}
    undo.callback(converted_to_fp32(module, record))
    in_fp32 = (name for name, tensor in module.named_parameters() if tensor.dtype != before[name])
    return weights, frozenset(in_fp32)


def quantized_while_read(
    opened: TensorSource,
    module: nn.Module,
    record: Quantize,
    layers: Mapping[str, str],
    device: torch.device,
) -> dict[str, nn.Module]:
    """Layers that are quantized as their weights are read, one by one, from these names."""
    library, layers_read = library_of(record), dict[str, nn.Module]()
    for name, stored in layers.items():
        part = module.get_submodule(name)
        assert isinstance(part, nn.Linear)
        value = opened.read(stored, None).to(device=device, dtype=part.weight.dtype)
        layers_read[name] = library.quantize(linear_like(part, value), record)
    return layers_read


def _check_quantized(opened: TensorSource, record: Quantize | None, module: nn.Module) -> None:
    """The tensors of quantized layers are loaded like others; all that remains is to check."""
    if record is not None:
        raise CheckpointError(
            "load_model(quantize=...): the model is quantized already. Leave quantize out, or pass "
            "the unquantized model."
        )
    for name, part, library in quantized_layers(module):
        stored, facts = opened.layers.get(name), library.facts(part)
        stored_facts = {} if stored is None else stored.facts
        same = stored is not None and stored.library is library
        if (stored is None and f"{name}.weight" not in opened.entries) or (
            same and all(stored_facts.get(key, facts[key]) == facts[key] for key in facts)
        ):
            continue
        what = "not quantized" if stored is None else f"of another format of {stored.library.name}"
        form = weight_format(part, library)
        raise CheckpointError(
            f"load_model: {name} is quantized as {form} in the model, and {what} in the source. "
            f"Load into the unquantized model, with quantize=... to quantize it."
        )


def put_stored_layers(
    source: Any, opened: TensorSource, module: nn.Module, record: Quantize | None = None
) -> Callable[[], None]:
    """Replace layers that are quantized in a source by ones on the meta device; returns the undo.

    `source` is the path that was opened; a config.json beside it is read.
    """
    config = _config_of(source)
    described = record or record_of(opened.what, opened.layers, opened.metadata, config)
    parts = dict(module.named_modules(remove_duplicate=False))
    replacements: dict[str, nn.Module] = {}
    for name, stored in opened.layers.items():
        part = parts.get(name)
        if type(part) is not nn.Linear:
            what = "does not have" if part is None else f"has as a {type(part).__name__}"
            raise CheckpointError(
                f"load_model: {opened.what} has the quantized layer {name}, which the model "
                f"{what}; an nn.Linear is needed." + _CONV1D * (type(part).__name__ == "Conv1D")
            )
        tensors: dict[str, Tensor] = {}
        for key in stored.keys:
            entry = opened.entries[f"{name}.{key}"]
            tensors[key] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        replacements[name] = _built(opened.what, name, part, tensors, stored, described)
        if record is not None and (other := difference(replacements[name], stored.library, record)):
            raise CheckpointError(
                f"load_model(quantize=fx.{type(record).__name__}(...)): asked for {other[0]}, but "
                f"{name} is quantized already in the source, with {other[1]}. Leave quantize out, "
                f"or load the unquantized model."
            )
    return put_layers(module, replacements)


def quantized_source(source: Any, module: nn.Module, record: Quantize) -> WeightSource:
    """A source whose weights are quantized as the module's, as they are read, layer by layer."""

    @contextlib.contextmanager
    def open_quantizing() -> Iterator[TensorSource]:
        with open_source(source) as opened:
            yield opened if opened.layers else _quantizing(opened, module, record)

    return WeightSource(what=str(source), open=open_quantizing)


def _quantizing(opened: TensorSource, module: nn.Module, record: Quantize) -> TensorSource:
    library = library_of(record)
    parts = {name: part for name, part, _ in quantized_layers(module)}
    owners: dict[str, tuple[str, str]] = {}
    entries = dict(opened.entries)
    layers: dict[str, StoredLayer] = {}
    for layer, part in parts.items():
        if entries.pop(f"{layer}.weight", None) is None:
            continue
        tensors = library.tensors(part)
        layers[layer] = StoredLayer(library=library, keys=tuple(tensors), facts=library.facts(part))
        for key, tensor in tensors.items():
            name = f"{layer}.{key}"
            owners[name] = layer, key
            entries[name] = FileTensor(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape))
    last: dict[str, Mapping[str, Tensor]] = {}

    def read(name: str, part: TensorIndex | None) -> Tensor:
        if name not in owners:
            return opened.read(name, part)
        layer, key = owners[name]
        if layer not in last:
            last.clear()
            quantized: Any = parts[layer]
            state = getattr(quantized, "quant_state", None)
            dtype = quantized.weight.dtype if state is None else state.dtype
            value = opened.read(f"{layer}.weight", None)
            value = value.to(dtype) if dtype.is_floating_point else value
            last[layer] = library.tensors(library.quantize(linear_like(quantized, value), record))
        value = last[layer][key]
        return value if part is None else value[part]

    return attrs.evolve(opened, entries=entries, read=read, layers=layers)


def _built(
    what: str,
    name: str,
    part: nn.Linear,
    tensors: Any,
    stored: StoredLayer,
    record: Quantize | None,
) -> nn.Module:
    wanted = (part.out_features, part.in_features)
    try:
        layer = stored.library.build(part, tensors, stored.facts, record)
        weight: Any = layer.weight
        shape = tuple(stored.facts.get("shape") or weight.shape)
        problem = shape_problem(stored.library, tensors, stored.facts, wanted)
    except FxError:
        raise
    except Exception as error:  # the library reads the description, and raises anything
        raise CheckpointError(
            f"load_model: in {what}, the description of the quantized layer {name} is damaged: "
            f"{type(error).__name__}: {str(error)[:200]}.",
            code="FX602",
        ) from error
    if shape != wanted:
        raise CheckpointError(
            f"load_model: the quantized layer {name} is {shown(list(shape))} in {what}, and "
            f"{list(wanted)} in the model."
        )
    if problem is not None:
        raise CheckpointError(
            f"load_model: in {what}, the quantized layer {name} is damaged: {problem}. Export or "
            f"download the model again.",
            code="FX602",
        )
    return layer


def _config_of(source: Any) -> Mapping[str, Any]:
    """`quantization_config` of the config.json beside a source; empty without one."""
    if not isinstance(source, str | os.PathLike):
        return {}
    path = Path(source)
    path = (path if path.is_dir() else path.parent) / "config.json"
    if not path.is_file():
        return {}
    config = parse_json_object(read_file(path, _LARGEST_CONFIG), path).get("quantization_config")
    return config if isinstance(config, dict) else {}
