"""Whether the tensors of a quantised layer in a file have the shapes that its kernels assume.

Kernels read scales by the shape of the weight, without a look at their length.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from fxtrain._record import shown
from fxtrain.precision.bnb_layers import BNB4, BNB8, float_dtype
from fxtrain.precision.library import Library, Tensors

# Shapes and dtypes; no dtypes for any.
_Wanted = Mapping[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]
# After an evaluation on a CPU, bitsandbytes saves scales in bf16, and reads them.
_NESTED_BLOCK = 256  # the only size that bitsandbytes writes and reads
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
        'SCB has the shape [3] of float32, and needs [4] of float32'
    """
    if library is BNB4 and _reordered(tensors):
        return (
            "bitsandbytes saved its scales after an evaluation on a CPU, in another order; save "
            "the model before it is evaluated"
        )
    if library is BNB4:
        wanted = _wanted4(facts, shape, tensors)
    elif library is BNB8:
        wanted: _Wanted = {"weight": (shape, (torch.int8,)), "SCB": (shape[:1], (torch.float32,))}
    else:
        wanted = _wanted_torchao(facts, shape)
    for name, (sizes, dtypes) in wanted.items():
        found = tensors.get(name)
        if found is None or (found.shape == sizes and (not dtypes or found.dtype in dtypes)):
            continue
        # The scales that bitsandbytes saves after an evaluation on a CPU are one row.
        if name != "weight.absmax" or found.shape != (1, *sizes) or found.dtype not in dtypes:
            dtype = f" of {_name(dtypes[0])}" if dtypes else ""
            return (
                f"{name} has the shape {list(found.shape)} of {_name(found.dtype)}, and needs "
                f"{list(sizes)}{dtype}"
            )
    return None


def _reordered(tensors: Tensors) -> bool:
    """Whether scales are in the order (blocks of a row, rows), as bitsandbytes unpacks them."""
    scales = tensors["weight.absmax"]
    return scales.ndim == 2 and len(scales) > 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wanted4(facts: Mapping[str, Any], shape: tuple[int, int], tensors: Tensors) -> _Wanted:
    """Two values in a byte, in blocks of the flattened weight; its storage may have any dtype."""
    elements = math.prod(shape)
    blocks = _parts(elements, facts["blocksize"])
    nested = "weight.nested_absmax" in tensors
    float_dtype(facts["dtype"])
    packed = _parts(_parts(elements, 2), tensors["weight"].element_size())
    wanted: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
        "weight": ((packed, 1), ()),
        "weight.absmax": ((blocks,), (torch.uint8,) if nested else _SCALES),
        "weight.quant_map": ((16,), (torch.float32,)),
    }
    if nested:
        count = _parts(blocks, facts["nested_blocksize"])
        if facts["nested_blocksize"] != _NESTED_BLOCK:
            raise ValueError(f"scales in blocks of {facts['nested_blocksize']}")
        wanted["weight.nested_absmax"] = ((count,), (torch.float32,))
        wanted["weight.nested_quant_map"] = ((256,), (torch.float32,))
    return wanted


def _wanted_torchao(facts: Mapping[str, Any], shape: tuple[int, int]) -> _Wanted:
    rows, columns = shape
    data, kind = facts["_data"], facts["_type"]
    if kind == "Int2Tensor":
        groups = _parts(columns, data["group"])
        return {
            "_weight_qdata": ((rows, columns // 4), (torch.uint8,)),
            "_weight_scale": ((rows, groups), ()),
        }
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
