"""What quantised layers tell of the record by which they were made."""

from typing import Any

from torch import Tensor, nn

from fxtrain.precision.bnb_layers import BNB4, state_of4
from fxtrain.precision.library import Library
from fxtrain.precision.plain_tensors import quantized_layers
from fxtrain.precision.torchao_layers import TORCHAO
from fxtrain.state import Quantize

NO_GRADIENT = (
    "computes without a gradient of its input, so nothing before it could train. Use Bnb4(), "
    "Bnb8() or Torchao with weights of 'int8', 'float8' or 'int2' and no activations, or wrap the "
    "model without an optimizer."
)


def difference(part: nn.Module, library: Library, record: Quantize) -> tuple[str, str] | None:
    """What a record asks for, and how a layer is quantised instead; None if that is the same.

    Example:
        >>> import torch
        >>> import fxtrain as fx
        >>> from fxtrain.precision import TORCHAO, quantize_layers
        >>> from fxtrain.precision.quantized_fields import difference
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 2))
        >>> layers = quantize_layers(net, fx.Torchao(), torch.device("cpu"))
        >>> difference(net[0], TORCHAO, fx.Torchao(activations="int8"))
        ("activations='int8'", 'with activations=None')
    """
    found, wanted = library.format(part), library.planned(record)
    if found != wanted:
        return wanted, f"as {found}"
    other = {
        name: value
        for name, value in _fields(part, library).items()
        if getattr(record, name) != value
    }
    if not other:
        return None
    asked = {name: getattr(record, name) for name in other}
    return _listed(asked), f"with {_listed(other)}"


def gradient_problem(module: nn.Module) -> str | None:
    """Which layer of a model gives no gradient to what is before it, or None."""
    for name, part, library in quantized_layers(module):
        found = library.format(part)
        activations = _fields(part, library).get("activations")
        if activations is not None or found == "torchao int4":
            inputs = f" with activations={activations!r}" if activations else ""
            return f"{name} is quantised as {found}{inputs}, which {NO_GRADIENT}"
    return None


def packed_layer(module: nn.Module) -> str | None:
    """The first layer whose scales bitsandbytes reordered, or would reorder, or None.

    On some CPUs its own forward packs weights. Moving or saving the model unpacks them, and leaves
    scales that are not quantised themselves in the order (blocks of a row, rows).
    """
    for name, part, library in quantized_layers(module):
        state = state_of4(part) if library is BNB4 else None
        if state is None or state.nested:
            continue
        reordered = state.absmax.ndim == 2 and len(state.absmax) > 1
        if reordered or getattr(state, "packing_format_for_cpu", False):
            return name
    return None


def _fields(part: nn.Module, library: Library) -> dict[str, Any]:
    """The fields of a record that a layer tells, beside its format."""
    if library is TORCHAO:
        return _torchao_fields(part.get_parameter("weight"))
    found = {name: value for name, value in library.settings(part).items() if name != "kind"}
    if library is BNB4:
        facts = library.facts(part)
        found |= {
            "blocksize": facts["blocksize"],
            "double_quant": "nested_blocksize" in facts,
        }
    return found


def _torchao_fields(weight: Tensor) -> dict[str, Any]:
    kept: Any = weight
    if hasattr(kept, "act_quant_kwargs"):
        float8 = kept.qdata.dtype.is_floating_point
        made = "float8" if float8 else "int8"
        return {"activations": None if kept.act_quant_kwargs is None else made}
    if hasattr(kept, "group"):
        return {"group": kept.group}
    return {"group": kept.block_size[-1]} if type(weight).__name__.startswith("Int4") else {}


def _listed(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())
