"""Whether the tensors of a quantised layer in a file are as large as its kernels take for granted.

Kernels read scales by the shape of the weight, without a look at their length.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fxtrain.precision.bnb_layers import BNB4, BNB8
from fxtrain.precision.library import Library, Tensors

__all__ = ["shape_problem"]

# Elements and dtypes; none of them for any.
_Sizes = Mapping[str, tuple[int, tuple[torch.dtype, ...]]]
# After an evaluation on a CPU, bitsandbytes saves scales in bf16, and reads them.
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


def shape_problem(
    library: Library, tensors: Tensors, facts: Mapping[str, Any], shape: tuple[int, int]
) -> str | None:
    """Which tensor of a layer does not fit its weight, or None.

    Args:
        tensors: Those of the layer, by their names below it.
        facts: What its file says beside them.
        shape: Output and input features.

    Raises:
        KeyError, TypeError, ValueError: the facts are damaged.

    Example:
        >>> import torch
        >>> from fxtrain.precision import BNB8
        >>> from fxtrain.precision.stored_shapes import shape_problem
        >>> tensors = {"weight": torch.zeros(4, 2, dtype=torch.int8), "SCB": torch.zeros(3)}
        >>> shape_problem(BNB8, tensors, {}, (4, 2))
        'SCB has 3 elements of float32, and needs 4 of float32'
    """
    if library is BNB4 and _reordered(tensors):
        return (
            "bitsandbytes saved its scales after an evaluation on a CPU, in another order; save "
            "the model before it is evaluated"
        )
    if library is BNB4:
        sizes = _sizes4(facts, shape, tensors)
    elif library is BNB8:
        sizes: _Sizes = {
            "weight": (math.prod(shape), (torch.int8,)),
            "SCB": (shape[0], (torch.float32,)),
        }
    else:
        sizes = _sizes_torchao(facts, shape)
    for name, (count, dtypes) in sizes.items():
        found = tensors.get(name)
        if found is not None and not _fits(found, count, dtypes):
            wanted = f"{count} of {_name(dtypes[0])}" if dtypes else f"{count}"
            return (
                f"{name} has {found.numel()} elements of {_name(found.dtype)}, and needs {wanted}"
            )
    return None


def _reordered(tensors: Tensors) -> bool:
    """Whether scales are in the order (blocks of a row, rows), as bitsandbytes unpacks them."""
    scales = tensors["weight.absmax"]
    return scales.ndim == 2 and len(scales) > 1


def _fits(tensor: Tensor, count: int, dtypes: tuple[torch.dtype, ...]) -> bool:
    return tensor.numel() == count and (not dtypes or tensor.dtype in dtypes)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes4(facts: Mapping[str, Any], shape: tuple[int, int], tensors: Tensors) -> _Sizes:
    """Two values in a byte, in blocks of the flattened weight; its storage may have any dtype."""
    elements = math.prod(shape)
    blocks = _parts(elements, facts["blocksize"])
    nested = "weight.nested_absmax" in tensors
    dtype = getattr(torch, facts["dtype"], None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"a weight of {facts['dtype']!r}")
    sizes: dict[str, tuple[int, tuple[torch.dtype, ...]]] = {
        "weight": (_parts(_parts(elements, 2), tensors["weight"].element_size()), ()),
        "weight.absmax": (blocks, (torch.uint8,) if nested else _SCALES),
        "weight.quant_map": (16, (torch.float32,)),
    }
    if nested:
        count = _parts(blocks, facts["nested_blocksize"])
        sizes["weight.nested_absmax"] = (count, (torch.float32,))
        sizes["weight.nested_quant_map"] = (256, (torch.float32,))
    return sizes


def _sizes_torchao(facts: Mapping[str, Any], shape: tuple[int, int]) -> _Sizes:
    rows, columns = shape
    data, kind = facts["_data"], facts["_type"]
    if kind == "Int2Tensor":
        groups = rows * _parts(columns, data["group"])
        return {
            "_weight_qdata": (rows * columns // 4, (torch.uint8,)),
            "_weight_scale": (groups, ()),
        }
    if "block_size" not in data:
        return {}
    high, wide = data["block_size"]
    scales = _parts(rows, high) * _parts(columns, wide)
    if kind == "Int4OpaqueTensor":
        return {
            "_weight_qdata": (rows * columns // 2, (torch.uint8,)),
            "_weight_scale_and_zero": (2 * scales, ()),
        }
    if kind not in ("Int8Tensor", "Float8Tensor"):
        return {}
    kept = (torch.int8,) if kind == "Int8Tensor" else ()
    return {
        "_weight_qdata": (rows * columns, kept),
        "_weight_scale": (scales, ()),
        "_weight_zero_point": (scales, ()),
    }


def _parts(whole: int, part: Any) -> int:
    if type(part) is not int or part < 1:
        raise ValueError(f"a block of {part!r} elements")
    return -(-whole // part)
