"""Weights as tensors of torchao, in plain linear layers."""

import importlib
import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain._optional import optional
from fxtrain._record import shown
from fxtrain.precision.library import Library, Tensors, linear_like, quiet
from fxtrain.state import Quantize
from fxtrain.state import Torchao as Record

_OPAQUE = "Int4OpaqueTensor"
_INT4 = "torchao.prototype.quantization.int4"
_SAFETENSORS = "torchao.prototype.safetensors.safetensors_utils"
_MODULES = ("torchao.quantization", "torchao.prototype.quantization")
# torchao and torch report kernels for other devices, and a decorator, when torchao is imported.
_LOGGERS = ("torchao", "torch.utils._pytree")


def import_torchao(needed_by: str) -> Any:
    """The package, imported without its remarks about kernels for other devices."""
    with quiet(*_LOGGERS):
        package = optional("torchao", extra="quant", needed_by=needed_by)
        importlib.import_module("torchao.quantization")
    return package


def quietly(name: str) -> Any:
    """A module of torchao, imported as `import_torchao` does."""
    with quiet(*_LOGGERS):
        return importlib.import_module(name)


def _owns(part: nn.Module) -> bool:
    weight = part._parameters.get("weight")
    return hasattr(weight, "__tensor_flatten__") and any(
        kind.__module__.startswith(_MODULES) for kind in type(weight).__mro__
    )


def _check(record: Record, device: torch.device) -> str | None:
    import_torchao("Plan(quantize=fx.Torchao(...))")
    call = f"Torchao(weights={record.weights!r}, activations={record.activations!r})"
    if record.weights == "float8" and record.activations and not has_float8(device):
        return (
            f"{call} needs a GPU with float8 matrix products: CUDA 8.9 or newer (L4, H100, "
            f"B200), MI300 or an Intel GPU; this device is {device.type}. Leave activations out: "
            f"weights then are float8 and products in the format of the input."
        )
    if record.weights == "int4" and device.type not in ("cpu", "meta", "cuda", "xpu"):
        return f"{call} has no kernels for {device.type}. Use weights='int8'."
    return None


def has_float8(device: torch.device) -> bool:
    """Whether a device has float8 matrix products; the meta device computes nothing."""
    if device.type in ("xpu", "meta"):
        return True
    if device.type != "cuda":
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)


def _config(record: Record, device: torch.device) -> Any:
    api = importlib.import_module("torchao.quantization")
    if record.weights == "int8":
        dynamic = api.Int8DynamicActivationInt8WeightConfig
        return dynamic() if record.activations else api.Int8WeightOnlyConfig()
    if record.weights == "float8":
        dynamic = api.Float8DynamicActivationFloat8WeightConfig
        return (
            dynamic(granularity=api.PerRow())
            if record.activations
            else api.Float8WeightOnlyConfig()
        )
    if device.type == "cpu":
        prototype = quietly(_INT4)
        return prototype.PrototypeInt4WeightOnlyConfig(group_size=record.group)
    return api.Int4WeightOnlyConfig(group_size=record.group)


def torchao_config(part: nn.Module) -> dict[str, Any] | None:
    """The library's own description of how a layer was quantized, as it writes it into files.

    None for formats that it does not write itself, and for scales that are not of whole rows.
    """
    weight: Any = part.weight
    formats = {"Int8Tensor": "int8", "Float8Tensor": "float8"}
    kind: Any = formats.get(type(weight).__name__)
    if kind is None or list(weight.block_size) != [1, weight.shape[1]]:
        return None
    record = Record(weights=kind, activations=kind if weight.act_quant_kwargs else None)
    core = importlib.import_module("torchao.core.config")
    return core.config_to_dict(_config(record, weight.device))


def _quantize(like: nn.Linear, record: Record) -> nn.Module:
    layer = linear_like(like)
    if like.weight.is_meta and record.weights == "int4":
        layer.weight = _frozen(_meta_int4(like.weight, record.group))
        return layer
    # torchao gives a layer attributes that cannot be pickled, so that another one gets its weight.
    quantized = linear_like(like, like.weight.detach())
    api = importlib.import_module("torchao.quantization")
    api.quantize_(quantized, _config(record, like.weight.device))
    weight: Any = quantized.weight.detach()
    if record.weights == "float8":  # torchao divides zero by zero in rows of zeros
        weight.qdata.view(torch.uint8).masked_fill_(weight.scale == 0, 0)
    layer.weight = _frozen(weight)
    return layer


def _frozen(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _meta_int4(weight: Tensor, group: int) -> Tensor:
    """What the prototype for CPUs makes of a weight; itself, it takes CPU tensors only."""
    rows, columns = weight.shape
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
    scales = torch.empty(columns // group, rows, 2, dtype=weight.dtype, device="meta")
    return _int4(packed, scales, [1, group], weight.shape)


def _int4(packed: Tensor, scales: Tensor, block: list[int], shape: torch.Size) -> Tensor:
    return quietly(_INT4).Int4OpaqueTensor(packed, scales, block, shape, None)


def _tensors(part: nn.Module) -> dict[str, Tensor]:
    weight: Any = part.weight
    return {f"_weight_{name}": getattr(weight, name) for name in weight.__tensor_flatten__()[0]}


def _put(part: nn.Module, tensors: Tensors) -> None:
    weight: Any = part.weight
    names, context = weight.__tensor_flatten__()
    inner = {name: tensors[f"_weight_{name}"] for name in names}
    replaced = type(weight).__tensor_unflatten__(inner, context, weight.shape, weight.stride())
    part.weight = _frozen(replaced)


def _facts(part: nn.Module) -> dict[str, Any]:
    weight: Any = part.weight
    if type(weight).__name__ == _OPAQUE:
        data = {"block_size": list(weight.block_size), "shape": list(weight.shape)}
        return {"_type": _OPAQUE, "_data": data, "_tensor_data_names": ["qdata", "scale_and_zero"]}
    support = quietly(_SAFETENSORS)
    return json.loads(json.dumps(weight, cls=support.TensorSubclassAttributeJSONEncoder))


def _build(
    like: nn.Linear, tensors: Tensors, facts: Mapping[str, Any], record: Quantize | None
) -> nn.Module:
    import_torchao("This file of quantized weights")
    inner = {name.removeprefix("_weight_"): tensor for name, tensor in tensors.items()}
    layer = linear_like(like)
    if facts["_type"] == _OPAQUE:
        block, shape = facts["_data"]["block_size"], torch.Size(facts["_data"]["shape"])
        weight = _int4(inner["qdata"], inner["scale_and_zero"], block, shape)
    else:
        weight = quietly(_SAFETENSORS).object_from_dict(
            {**facts, "_data": {**facts["_data"], **inner}}
        )
        for name in ("act_quant_kwargs", "mm_config", "kernel_preference"):
            value = getattr(weight, name, None)
            if value is not None and not type(value).__module__.startswith("torchao."):
                raise ValueError(f"{name} is {shown(value)}")
    layer.weight = _frozen(weight)
    return layer


def _settings(part: nn.Module) -> dict[str, Any]:
    weight: Any = part.weight
    words = re.match("[A-Z][a-z]+[0-9]?", type(weight).__name__)  # as in Float8Tensor
    weights = words[0].lower() if words else type(weight).__name__
    fields: dict[str, Any] = {"kind": "torchao", "weights": weights}
    if hasattr(weight, "act_quant_kwargs"):
        fields["activations"] = None if weight.act_quant_kwargs is None else weights
    elif weights == "int4":
        fields["group"] = weight.block_size[-1]
    return fields


TORCHAO = Library(
    name="torchao",
    owns=_owns,
    check=_check,
    quantize=_quantize,
    tensors=_tensors,
    put=_put,
    facts=_facts,
    build=_build,
    settings=_settings,
)
