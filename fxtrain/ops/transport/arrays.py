"""NumPy values and Python numbers as tensors, and back.

NumPy is used only if something else has imported it.
"""

import sys
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor

# From a tensor back to the type of the original leaf.
Back = Callable[[Tensor], Any]

_KINDS = "biufc"  # bool, signed and unsigned integers, floating point, complex
_WIDEST = 16  # bytes of a complex128, torch's widest dtype
_INT64 = range(-(2**63), 2**63)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a NumPy array or scalar."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray | numpy.generic)


def as_tensor(leaf: Any) -> tuple[Tensor, Back] | None:
    """A NumPy array or scalar as a tensor, which may share its memory; None for other leaves.

    Arrays of strings, dates, objects or records, and dtypes that torch lacks, count as other
    leaves.
    """
    if not is_array(leaf) or not _is_numeric(leaf):
        return None
    numpy: Any = sys.modules["numpy"]
    native = numpy.dtype(f"{leaf.dtype.kind}{leaf.dtype.itemsize}")
    back = _scalar if isinstance(leaf, numpy.generic) else _array
    flags = leaf.flags
    # torch refuses negative strides, even with one entry, and warns about read-only arrays.
    ordered = flags.c_contiguous and min(leaf.strides, default=0) >= 0
    if not (ordered and flags.aligned and flags.writeable and leaf.dtype == native):
        leaf = numpy.array(leaf, native, order="C")
    # C has several types of the same width; torch knows one of them.
    return torch.from_numpy(leaf.view(native)), back


def number_as_tensor(leaf: Any) -> tuple[Tensor, Back] | None:
    """A Python number as a 64-bit tensor, 128-bit if complex; None for other leaves."""
    kind = type(leaf)
    if kind is float or (kind is int and leaf in _INT64):
        dtype = torch.float64 if kind is float else torch.int64
        return torch.tensor(leaf, dtype=dtype, device="cpu"), _number
    if kind is complex:
        return torch.tensor(leaf, dtype=torch.complex128, device="cpu"), _number
    return None


def combinable(leaf: Any) -> str | None:
    """Describe a numeric leaf that cannot be combined; None if the leaf is not numeric."""
    if is_array(leaf):
        text = f"a NumPy value of dtype {leaf.dtype}"
        masked = hasattr(leaf, "mask")
        return None if leaf.dtype.kind in "SU" else f"{text} with a mask" if masked else text
    if type(leaf) is int:
        return "an integer that does not fit into 64 bits"
    if isinstance(leaf, Number) and not isinstance(leaf, bool):
        return f"a {type(leaf).__qualname__}"
    return None


def _is_numeric(leaf: Any) -> bool:
    kind, size = leaf.dtype.kind, leaf.dtype.itemsize
    wide = size > (_WIDEST if kind == "c" else _WIDEST // 2)
    return kind in _KINDS and not wide and not hasattr(leaf, "mask")


def _array(tensor: Tensor) -> Any:
    return tensor.numpy()


def _scalar(tensor: Tensor) -> Any:
    return tensor.numpy()[()]


def _number(tensor: Tensor) -> Any:
    return tensor.item()
