"""Layers of bitsandbytes: int8 with a scale per row, four bits with a scale per block."""

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fxtrain._optional import optional
from fxtrain._record import shown
from fxtrain.errors import CheckpointError
from fxtrain.ops.whole_tensors import is_sharded
from fxtrain.precision.library import Library, Tensors, quiet
from fxtrain.state import Bnb4, Bnb8, Quantize

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, None: None}
NESTED_BLOCK = 256  # scales that share one; the only size that bitsandbytes writes and reads


def _is_class(part: nn.Module, name: str) -> bool:
    """Whether a module is of a class of bitsandbytes, without importing it."""
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(part).__mro__]
    return ("bitsandbytes", name) in kinds


def _modules(record: type) -> Any:
    needed_by = f"Plan(quantize=fx.{record.__name__}(...))"
    with quiet("bitsandbytes"):
        optional("bitsandbytes", extra="quant", needed_by=needed_by)
    return importlib.import_module("fxtrain.precision.bnb_modules")


def _check(record: Quantize, device: torch.device) -> str | None:
    _modules(type(record))
    if device.type in ("cpu", "cuda", "xpu", "meta", "hpu"):
        return None
    return f"bitsandbytes has no kernels for {device.type}. Use a CPU, CUDA or XPU device."


def _with_bias(layer: nn.Module, like: nn.Linear) -> nn.Module:
    layer.bias = like.bias  # pyright: ignore[reportAttributeAccessIssue]
    return layer.train(like.training)


# Four bits.


def state_of4(part: Any) -> Any:
    """How the weight is packed in files; None before it is quantized.

    Moving a module in a dry run replaces parameters without their attributes.
    """
    state = getattr(part._parameters.get("weight"), "quant_state", None)
    return getattr(part, "quant_state", None) if state is None else state


def _layer4(like: nn.Linear, compute: torch.dtype | None) -> Any:
    kind = _modules(Bnb4).Linear4bit
    with _disable_current_modes():  # a dry run's, whose tensors the library's classes do not take
        layer = kind(like.in_features, like.out_features, bias=False, device="meta")
    layer.compute_dtype, layer.compute_type_is_set = compute, True
    return _with_bias(layer, like)


def _quantize4(like: nn.Linear, record: Bnb4) -> nn.Module:
    layer = _layer4(like, _COMPUTE[record.compute])
    weight = like.weight.detach()
    functional = importlib.import_module("bitsandbytes.functional")
    if _has_no_values(weight):
        tensors = _empty4(weight, record)
    else:
        packed, state = functional.quantize_4bit(
            weight.contiguous(),
            blocksize=record.blocksize,
            compress_statistics=record.double_quant,
            quant_type=record.quant_type,
        )
        tensors = {"weight": packed, **_of_state(state)}
        # The library shares its tables between layers; a file that is read must not change them.
        tables = [key for key in tensors if key.endswith("quant_map")]
        tensors |= {key: tensors[key].clone() for key in tables}
    facts = {
        "quant_type": record.quant_type,
        "blocksize": record.blocksize,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "nested_blocksize": NESTED_BLOCK,
        "nested_dtype": "float32",
    }
    _put4(layer, tensors, facts=facts)
    return layer


def sizes4(elements: int, blocksize: int, *, nested: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a four-bit weight: two values in a byte, a scale per block."""
    blocks = -(-elements // blocksize)
    sizes = {"weight": (-(-elements // 2), 1), "weight.absmax": (blocks,)}
    sizes["weight.quant_map"] = (16,)
    if nested:
        sizes["weight.nested_absmax"] = (-(-blocks // NESTED_BLOCK),)
        sizes["weight.nested_quant_map"] = (256,)
        sizes["weight.nested_offset"] = ()
    return sizes


def _empty4(weight: Tensor, record: Bnb4) -> dict[str, Tensor]:
    sizes = sizes4(weight.numel(), record.blocksize, nested=record.double_quant)
    in_bytes = ("weight", "weight.absmax") if record.double_quant else ("weight",)
    return {
        name: weight.new_empty(size, dtype=torch.uint8 if name in in_bytes else torch.float32)
        for name, size in sizes.items()
    }


def _of_state(state: Any) -> dict[str, Tensor]:
    tensors = {"weight.absmax": state.absmax, "weight.quant_map": state.code}
    if state.nested:
        tensors["weight.nested_absmax"] = state.state2.absmax
        tensors["weight.nested_quant_map"] = state.state2.code
        tensors["weight.nested_offset"] = state.offset
    return tensors


def _tensors4(part: Any) -> dict[str, Tensor]:
    weight: Any = part.weight
    state = state_of4(part)
    # Unpacking leaves scales that are not quantized in the order (blocks of a row, rows).
    unpacked = not state.nested and state.absmax.ndim == 2 and len(state.absmax) > 1
    if unpacked or getattr(state, "packing_format_for_cpu", False):
        raise CheckpointError(
            "bitsandbytes packed the weights of this model for the CPU in an evaluation, which "
            "loses bits. Quantize with fx.load_model(..., quantize=fx.Bnb4()), whose layers "
            "stay as they are, or use the model before its first evaluation."
        )
    return {"weight": _plain(weight), **_of_state(state)}


def _plain(weight: Tensor) -> Tensor:
    """The same memory as a plain tensor, or as a DTensor."""
    plain = weight.detach()
    return plain if is_sharded(plain) else plain.as_subclass(Tensor)


def _has_no_values(weight: Tensor) -> bool:
    """Whether it is on the meta device or of a dry run.

    The library computes its tables with the first weight, and would keep ones without values.
    """
    return weight.is_meta or type(weight).__name__ == "FakeTensor"


def _weight(kind: str, tensor: Tensor, attributes: dict[str, Any], **options: Any) -> nn.Parameter:
    """A parameter of a class of the library, or a plain one in a dry run, with these attributes."""
    if type(tensor).__name__ != "FakeTensor":
        make = getattr(importlib.import_module("bitsandbytes").nn, kind)
        return make(tensor, requires_grad=False, **attributes, **options)
    parameter = nn.Parameter(tensor, requires_grad=False)
    vars(parameter).update(attributes)
    return parameter


def _put4(part: nn.Module, tensors: Tensors, facts: Mapping[str, Any] | None = None) -> None:
    facts = _facts4(part) if facts is None else facts
    bnb = importlib.import_module("bitsandbytes")
    nested = None
    if "weight.nested_absmax" in tensors:
        nested = bnb.functional.QuantState(
            absmax=tensors["weight.nested_absmax"],
            blocksize=facts["nested_blocksize"],
            code=tensors["weight.nested_quant_map"],
            dtype=float_dtype(facts["nested_dtype"]),
        )
    state = bnb.functional.QuantState(
        absmax=tensors["weight.absmax"],
        shape=torch.Size(facts["shape"]),
        code=tensors["weight.quant_map"],
        blocksize=facts["blocksize"],
        quant_type=facts["quant_type"],
        dtype=float_dtype(facts["dtype"]),
        offset=tensors.get("weight.nested_offset"),
        state2=nested,
    )
    layer: Any = part
    layer.quant_state = state
    layer.weight = _weight(
        "Params4bit",
        tensors["weight"],
        {"quant_state": state},
        blocksize=state.blocksize,
        compress_statistics=state.nested,
        quant_type=state.quant_type,
        quant_storage=tensors["weight"].dtype,
        bnb_quantized=True,
        module=None,
    )


def float_dtype(name: Any) -> torch.dtype:
    """A floating dtype by its name; a ValueError if there is none."""
    dtype = getattr(torch, name, None) if type(name) is str else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"a weight of {shown(name)}")
    return dtype


def _facts4(part: nn.Module) -> dict[str, Any]:
    state = state_of4(part)
    facts = {
        "quant_type": state.quant_type,
        "blocksize": state.blocksize,
        "shape": list(state.shape),
        "dtype": str(state.dtype).removeprefix("torch."),
    }
    if state.nested:
        facts["nested_blocksize"] = state.state2.blocksize
        facts["nested_dtype"] = str(state.state2.dtype).removeprefix("torch.")
    return facts


def _build4(
    like: nn.Linear, tensors: Tensors, facts: Mapping[str, Any], record: Quantize | None
) -> nn.Module:
    layer = _layer4(like, _COMPUTE[record.compute if isinstance(record, Bnb4) else "bf16"])
    _put4(layer, tensors, facts=facts)
    return layer


def _split4(part: Any, device: torch.device) -> None:
    state = state_of4(part)
    state.to(device)
    part.quant_state = state
    part.weight = nn.Parameter(_plain(part.weight), requires_grad=False)


def _settings4(part: nn.Module) -> dict[str, Any]:
    dtype: Any = part.compute_dtype
    facts, names = _facts4(part), {value: name for name, value in _COMPUTE.items()}
    return {
        "kind": "bnb4",
        "quant_type": facts["quant_type"],
        "double_quant": "nested_blocksize" in facts,
        "blocksize": facts["blocksize"],
        "compute": names[dtype],
    }


# Eight bits.


def _owns8(part: nn.Module) -> bool:
    layer: Any = part
    return (
        _is_class(part, "Linear8bitLt")
        and not layer.state.has_fp16_weights
        and layer.weight.dtype == torch.int8
    )


def _quantize8(like: nn.Linear, record: Bnb8) -> nn.Module:
    layer = _layer8(like, record)
    weight = like.weight.detach()
    if _has_no_values(weight):
        packed = weight.new_empty(weight.shape, dtype=torch.int8)
        scales = weight.new_empty(len(weight), dtype=torch.float32)
    else:
        functional = importlib.import_module("bitsandbytes.functional")
        packed, scales, _ = functional.int8_vectorwise_quant(weight.half().contiguous())
    _put8(layer, {"weight": packed, "SCB": scales})
    return layer


def _layer8(like: nn.Linear, record: Bnb8) -> nn.Module:
    kind = _modules(Bnb8).Linear8bitLt
    options = {"has_fp16_weights": False, "threshold": record.threshold, "device": "meta"}
    with _disable_current_modes():
        layer = kind(like.in_features, like.out_features, bias=False, **options)
    return _with_bias(layer, like)


def _tensors8(part: Any) -> dict[str, Tensor]:
    weight: Any = part.weight
    # The library's own forward moves the scales from the weight to the state.
    scales = getattr(weight, "SCB", None)
    return {"weight": _plain(weight), "SCB": part.state.SCB if scales is None else scales}


def _put8(part: nn.Module, tensors: Tensors) -> None:
    layer: Any = part
    packed, scales = tensors["weight"], {"SCB": tensors["SCB"]}
    # Moving a module in a dry run replaces parameters without their attributes.
    layer.state.CB, layer.state.SCB = None, tensors["SCB"]
    layer.weight = _weight("Int8Params", packed, scales, has_fp16_weights=False, CB=packed)


def _settings8(part: Any) -> dict[str, Any]:
    return {"kind": "bnb8", "threshold": float(part.state.threshold)}


def _split8(part: Any, device: torch.device) -> None:
    tensors = _tensors8(part)
    part.state.CB, part.state.SCB = None, tensors["SCB"].to(device)
    part.weight = nn.Parameter(tensors["weight"], requires_grad=False)


def _build8(
    like: nn.Linear, tensors: Tensors, facts: Mapping[str, Any], record: Quantize | None
) -> nn.Module:
    layer = _layer8(like, record if isinstance(record, Bnb8) else Bnb8())
    _put8(layer, tensors)
    return layer


BNB4 = Library(
    name="bitsandbytes",
    owns=lambda part: _is_class(part, "Linear4bit") and state_of4(part) is not None,
    check=_check,
    quantize=_quantize4,
    tensors=_tensors4,
    put=_put4,
    facts=_facts4,
    build=_build4,
    settings=_settings4,
    split=_split4,
)
BNB8 = Library(
    name="bitsandbytes",
    owns=_owns8,
    check=_check,
    quantize=_quantize8,
    tensors=_tensors8,
    put=_put8,
    facts=lambda part: {},
    build=_build8,
    settings=_settings8,
    split=_split8,
)
