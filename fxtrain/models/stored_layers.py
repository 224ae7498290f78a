"""Quantized layers in files: how bitsandbytes and torchao write them, read, checked and written.

Files are those of the libraries, so that transformers reads them too. bitsandbytes stores a small
JSON text beside the tensors of a four-bit layer; torchao stores one in the file's metadata.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from fxtrain._record import shown
from fxtrain.errors import CheckpointError, FxError
from fxtrain.ops.whole_tensors import weight_of
from fxtrain.precision.bnb_layers import BNB4, BNB8, NESTED_BLOCK, float_dtype, sizes4
from fxtrain.precision.library import Library, Tensors
from fxtrain.precision.quantizing import quantized_layers
from fxtrain.precision.torchao_layers import TORCHAO
from fxtrain.state import Bnb4, Bnb8, FileTensor, Quantize, Weight, structure
from fxtrain.state.parsing import parse_json

# Metadata of a file: fields of a record that tensors do not show.
DESCRIPTION = "fxtrain.quantize"
_SUMMARY = ".weight.quant_state.bitsandbytes__"
_OFFSET = "weight.nested_offset"
_NAMES = "tensor_names"
_MAX_SUMMARY_BYTES = 100_000
_SUMMARY_KEYS = ("quant_type", "blocksize", "shape", "dtype")


@attrs.frozen(kw_only=True, eq=False)
class StoredLayer:
    """A quantized layer in a source."""

    library: Library
    keys: tuple[str, ...]  # names of its tensors below the layer's
    facts: Mapping[str, Any]  # what `library.build` needs beside them
    values: Mapping[str, Tensor] = attrs.Factory(dict)  # tensors that the file holds as text
    summaries: tuple[str, ...] = ()  # names of entries that are not tensors of the layer


def stored_layers(
    what: str,
    entries: Mapping[str, FileTensor],
    metadata: Mapping[str, str],
    read: Callable[[str], Tensor],
) -> dict[str, StoredLayer]:
    """The quantized layers among the tensors of a source."""
    layers: dict[str, StoredLayer] = {}
    for name, entry in entries.items():
        layer, mark, _ = name.partition(_SUMMARY)
        if mark:
            layers[layer] = _stored4(what, layer, name, entries, read)
        elif name.endswith(".SCB"):
            layer = name.removesuffix(".SCB")
            weight = entries.get(f"{layer}.weight")
            if weight is not None and weight.dtype == torch.int8 and entry.dtype == torch.float32:
                summary = f"{layer}.weight_format"
                layers[layer] = StoredLayer(
                    library=BNB8, keys=("weight", "SCB"), facts={}, summaries=(summary,)
                )
    return layers | _stored_torchao(what, entries, metadata)


def saved_layers(
    what: str, entries: Mapping[str, FileTensor], saved: Any
) -> tuple[dict[str, StoredLayer], dict[str, str]]:
    """The quantized layers of a model in a checkpoint, and metadata as those of a model file.

    `saved` has the plan of the model, and its values beside tensors.
    """
    layers: dict[str, StoredLayer] = {}
    try:
        for layer, described in saved["values"].get("quantized", {}).items():
            facts = dict(described)
            package, _, kind = facts.pop("format").partition(" ")
            library = TORCHAO if package == "torchao" else BNB8 if kind == "int8" else BNB4
            own = [name for name in entries if name.startswith(f"{layer}.")]
            keys = tuple(name[len(layer) + 1 :] for name in own if name != f"{layer}.bias")
            if keys:  # otherwise the checkpoint has digests of them
                layers[layer] = StoredLayer(library=library, keys=keys, facts=facts)
        record = saved["plan"].get("quantize")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(what, "its description of quantized weights", error) from error
    return layers, {DESCRIPTION: json.dumps(record)} if record else {}


def record_of(
    what: str,
    layers: Mapping[str, StoredLayer],
    metadata: Mapping[str, str],
    config: Mapping[str, Any],
) -> Quantize | None:
    """How layers compute, as far as a file or a transformers configuration says so."""
    libraries = {stored.library for stored in layers.values()}
    try:
        if DESCRIPTION in metadata:
            data = parse_json(metadata[DESCRIPTION])
            kinds = {"bnb4": Bnb4, "bnb8": Bnb8}
            return structure(data, kinds[data["kind"]]) if data["kind"] in kinds else None
        if BNB8 in libraries and "llm_int8_threshold" in config:
            return Bnb8(threshold=config["llm_int8_threshold"])
        if BNB4 in libraries and "bnb_4bit_compute_dtype" in config:
            words = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
            return Bnb4(compute=words[config["bnb_4bit_compute_dtype"]])  # type: ignore[arg-type]
    except (ValueError, KeyError, TypeError, FxError) as error:
        raise _damaged(what, "its description of quantized weights", error) from error
    return None


def file_weights(module: nn.Module, weights: Mapping[str, Weight]) -> dict[str, Weight]:
    """The tensors of a model as the libraries of its quantized layers write them."""
    tensors = dict(weights)
    for name, part, library in quantized_layers(module):
        prefix = f"{name}." if name else ""
        for key in library.tensors(part):
            if prefix + key in tensors:  # tables may be shared, and files hold one for each layer
                tensors[prefix + key] = attrs.evolve(tensors[prefix + key], key=prefix + key)
        if library is BNB4:
            offset = tensors.pop(prefix + _OFFSET, None)
            text = _summary4(library.facts(part), offset)
            summary = f"{name}{_SUMMARY}{library.facts(part)['quant_type']}".lstrip(".")
            tensors[summary] = weight_of(text)
        elif library is BNB8:
            row_major = torch.zeros((), dtype=torch.uint8, device="cpu")
            tensors[f"{prefix}weight_format"] = weight_of(row_major)
    return tensors


def file_metadata(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """What the files of a model with quantized layers say beside tensors."""
    layers = list(quantized_layers(module))
    if not layers:
        return {}
    _, first, library = layers[0]
    metadata = {DESCRIPTION: json.dumps(library.settings(first))}
    torchao = {name: (part, library) for name, part, library in layers if library is TORCHAO}
    if torchao:
        own = {
            f"{name}.{key}"
            for name, (part, library) in torchao.items()
            for key in library.tensors(part)
        }
        plain = [name for name in names if name not in own]
        whole = {f"{name}.weight": library.facts(part) for name, (part, library) in torchao.items()}
        metadata |= {name: json.dumps(facts) for name, facts in whole.items()}
        metadata |= {name: json.dumps({"_type": "Tensor"}) for name in plain}
        metadata[_NAMES] = json.dumps([*whole, *plain])
    return metadata


def _damaged(what: str, subject: str, error: Exception | str) -> CheckpointError:
    return CheckpointError(
        f"load_model: {what} is damaged: {subject}: {str(error)[:200]}. Export or download the "
        f"model again.",
        code="FX602",
    )


def _stored4(
    what: str,
    layer: str,
    name: str,
    entries: Mapping[str, FileTensor],
    read: Callable[[str], Tensor],
) -> StoredLayer:
    try:
        if entries[name].dtype != torch.uint8 or entries[name].nbytes > _MAX_SUMMARY_BYTES:
            raise ValueError("it is not a text")
        facts = parse_json(bytes(read(name).flatten().tolist()))
        missing = [key for key in _SUMMARY_KEYS if key not in facts]
        if missing or facts["quant_type"] not in ("nf4", "fp4") or facts["quant_type"] not in name:
            raise ValueError(f"missing or wrong: {', '.join(missing) or 'quant_type'}")
        offset = facts.get("nested_offset")
        if type(offset) not in (int, float, type(None)):
            raise ValueError(f"nested_offset is {shown(offset)}")
        values = {} if offset is None else {_OFFSET: torch.tensor(float(offset), device="cpu")}
    except (ValueError, TypeError, OverflowError) as error:
        subject = f"{name}, which describes a four-bit layer of bitsandbytes"
        raise _damaged(what, subject, error) from error
    stored = ("weight", "weight.absmax", "weight.quant_map")
    nested = ("weight.nested_absmax", "weight.nested_quant_map") if values else ()
    for key in (*stored, *nested):
        if f"{layer}.{key}" not in entries:
            subject = f"{layer}, a four-bit layer of bitsandbytes"
            raise _damaged(what, subject, f"there is no {layer}.{key}")
    return StoredLayer(
        library=BNB4,
        keys=(*stored, *nested, *values),
        facts=facts,
        values=values,
        summaries=(name,),
    )


def _stored_torchao(
    what: str, entries: Mapping[str, FileTensor], metadata: Mapping[str, str]
) -> dict[str, StoredLayer]:
    layers: dict[str, StoredLayer] = {}
    name = _NAMES
    try:
        for name in parse_json(metadata.get(_NAMES, "[]")):
            facts = parse_json(metadata[name])
            if "_tensor_data_names" not in facts or not name.endswith(".weight"):
                continue
            layer = name.removesuffix(".weight")
            keys = tuple(f"_weight_{key}" for key in facts["_tensor_data_names"])
            if all(f"{layer}.{key}" in entries for key in keys):
                layers[layer] = StoredLayer(library=TORCHAO, keys=keys, facts=facts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        subject = f"the metadata of torchao's tensor {shown(name)}"
        raise _damaged(what, subject, f"{type(error).__name__}: {error}") from error
    return layers


def _summary4(facts: Mapping[str, Any], offset: Weight | None) -> Tensor:
    data = dict(facts)
    if offset is None:
        data = {key: value for key, value in data.items() if not key.startswith("nested")}
    else:
        data["nested_offset"] = float(offset.gather())
    text = json.dumps(data).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# Shapes and dtypes; no dtypes for any.
_Wanted = Mapping[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]
# After an evaluation on a CPU, bitsandbytes saves scales in bf16, and reads them.
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


def shape_problem(
    library: Library, tensors: Tensors, facts: Mapping[str, Any], shape: tuple[int, int]
) -> str | None:
    """Which tensor of a layer does not fit its weight of (output, input) features, or None."""
    if library is BNB4:
        wanted = _wanted4(facts, shape, tensors)
    elif library is BNB8:
        wanted: _Wanted = {"weight": (shape, (torch.int8,)), "SCB": (shape[:1], (torch.float32,))}
    else:
        wanted = _wanted_torchao(facts, shape)
    for name, (sizes, dtypes) in wanted.items():
        tensor = tensors.get(name)
        if tensor is None or (tensor.shape == sizes and (not dtypes or tensor.dtype in dtypes)):
            continue
        # The scales that bitsandbytes saves after an evaluation on a CPU are one row.
        if name != "weight.absmax" or tensor.shape != (1, *sizes) or tensor.dtype not in dtypes:
            dtype = f" of {_name(dtypes[0])}" if dtypes else ""
            return (
                f"{name} has the shape {list(tensor.shape)} of {_name(tensor.dtype)}, and needs "
                f"{list(sizes)}{dtype}"
            )
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wanted4(facts: Mapping[str, Any], shape: tuple[int, int], tensors: Tensors) -> _Wanted:
    """Two values in a byte, in blocks of the flattened weight; its storage may have any dtype."""
    nested = "weight.nested_absmax" in tensors
    float_dtype(facts["dtype"])
    if nested and facts["nested_blocksize"] != NESTED_BLOCK:
        raise ValueError(f"scales in blocks of {shown(facts['nested_blocksize'])}")
    _parts(1, facts["blocksize"])  # raises if it is no size
    sizes = sizes4(math.prod(shape), facts["blocksize"], nested=nested)
    sizes.pop("weight.nested_offset", None)  # of the description, not of a file's tensor
    packed = _parts(sizes.pop("weight")[0], tensors["weight"].element_size())
    wanted: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        name: (size, (torch.float32,)) for name, size in sizes.items()
    }
    scales = (torch.uint8,) if nested else _SCALES
    return wanted | {"weight": ((packed, 1), ()), "weight.absmax": (sizes["weight.absmax"], scales)}


def _wanted_torchao(facts: Mapping[str, Any], shape: tuple[int, int]) -> _Wanted:
    rows, columns = shape
    data, kind = facts["_data"], facts["_type"]
    if "block_size" not in data:
        return {}
    high, wide = data["block_size"]
    scales = _parts(rows, high), _parts(columns, wide)
    if kind == "Int4OpaqueTensor":
        return {
            "_weight_qdata": ((rows, columns // 2), (torch.uint8,)),
            "_weight_scale_and_zero": ((*reversed(scales), 2), ()),
        }
    if kind not in ("Int8Tensor", "Float8Tensor"):
        return {}
    return {
        "_weight_qdata": (shape, (torch.int8,) if kind == "Int8Tensor" else ()),
        "_weight_scale": (scales, ()),
        "_weight_zero_point": (scales, ()),
    }


def _parts(whole: int, part: Any) -> int:
    if type(part) is not int or part < 1:
        raise ValueError(f"a block of {shown(part)} elements")
    return -(-whole // part)
