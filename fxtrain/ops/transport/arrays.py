"""NumPy values and Python numbers as tensors, and back.

NumPy is looked for only where something else has imported it.
"""

import sys
from collections.abc import Callable
from numbers import Number
from typing import Any

import torch
from torch import Tensor

__all__ = ["Back", "as_tensor", "combinable", "is_array", "number_as_tensor"]

# From a tensor to what the leaf was before.
Back = Callable[[Tensor], Any]

_KINDS = "biufc"  # bool, whole numbers, with and without sign, floating and complex numbers
_WIDEST = 16  # bytes of a complex128; torch has no wider numbers
_INT64 = range(-(2**63), 2**63)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is a NumPy array or scalar."""
    numpy: Any = sys.modules.get("numpy")
    return numpy is not None and isinstance(leaf, numpy.ndarray | numpy.generic)


def as_tensor(leaf: Any) -> tuple[Tensor, Back] | None:
    """A NumPy array or scalar as a tensor, which may share its memory; None for other leaves.

    Arrays of strings, dates, objects and records, and numbers that torch does not have, are
    other leaves.
    """
    if not is_array(leaf) or not _is_numeric(leaf):
        return None
    numpy: Any = sys.modules["numpy"]
    native = numpy.dtype(f"{leaf.dtype.kind}{leaf.dtype.itemsize}")
    back = _scalar if isinstance(leaf, numpy.generic) else _array
    flags = leaf.flags
    # torch takes no negative strides, not even of one entry, and warns of what is read-only.
    ordered = flags.c_contiguous and min(leaf.strides, default=0) >= 0
    if not (ordered and flags.aligned and flags.writeable and leaf.dtype == native):
        leaf = numpy.array(leaf, native, order="C")
    # C has several types of one width, of which torch knows one.
    return torch.from_numpy(leaf.view(native)), back


def number_as_tensor(leaf: Any) -> tuple[Tensor, Back] | None:
    """A Python number as a tensor of 64 bits, or 128 if complex; None for other leaves."""
    kind = type(leaf)
    if kind is float or (kind is int and leaf in _INT64):
        return torch.tensor(leaf, dtype=torch.float64 if kind is float else torch.int64), _number
    if kind is complex:
        return torch.tensor(leaf, dtype=torch.complex128), _number
    return None


def combinable(leaf: Any) -> str | None:
    """What a leaf is that is a number of sorts, and cannot be combined; None if it is none."""
    if is_array(leaf):
        held = f"a NumPy value of dtype {leaf.dtype}"
        masked = hasattr(leaf, "mask")
        return None if leaf.dtype.kind in "SU" else f"{held} with a mask" if masked else held
    if type(leaf) is int:
        return "a whole number that does not fit into 64 bits"
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
