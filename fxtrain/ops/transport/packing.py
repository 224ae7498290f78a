"""Trees to flat buffers and back; NumPy values and Python numbers are tensors there.

NumPy is used only if something else has imported it.
"""

import sys
from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any

import attrs
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from fxtrain import _tree
from fxtrain.errors import CollectiveError

# From a tensor back to the type of the original leaf.
Back = Callable[[Tensor], Any]
_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_KINDS = "biufc"  # bool, signed and unsigned integers, floating point, complex
_WIDEST = 16  # bytes of a complex128, torch's widest dtype; rows begin at a multiple of them
_INT64 = range(-(2**63), 2**63)


@attrs.frozen(kw_only=True, eq=False)
class Packed:
    """A tree taken apart: tensors and other leaves, each with its place among the leaves.

    Attributes:
        shape: The structure of the tree.
        tensors: Detached tensor leaves, and those of NumPy as tensors, by place.
        others: Every other leaf, by place.
        back: How leaves that were not tensors are converted back, by place.
    """

    shape: _tree.TreeSpec
    tensors: dict[int, Tensor]
    others: dict[int, Any]
    back: dict[int, Back]

    def rebuild(self, leaves: dict[int, Any]) -> Any:
        """A tree of this structure with other leaves."""
        for place, back in self.back.items():
            leaves[place] = back(leaves[place])
        return _tree.unflatten(self.shape, [leaves[place] for place in range(len(leaves))])


def pack(tree: Any, *, numbers: bool = False) -> Packed:
    """Take a tree apart.

    Args:
        numbers: Python numbers are tensors too.
    """
    return packed_leaves(*_tree.flatten(tree), numbers=numbers)


def packed_leaves(leaves: Sequence[Any], shape: _tree.TreeSpec, *, numbers: bool = False) -> Packed:
    """As `pack`, for a tree that is already flattened."""
    tensors: dict[int, Tensor] = {}
    others: dict[int, Any] = {}
    back: dict[int, Back] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            _check_layout(leaf)
            tensors[place] = leaf.detach() if leaf.requires_grad else leaf
        elif converted := as_tensor(leaf) or (number_as_tensor(leaf) if numbers else None):
            tensors[place], back[place] = converted
        else:
            others[place] = leaf
    return Packed(shape=shape, tensors=tensors, others=others, back=back)


def _check_layout(leaf: Any) -> None:
    """Refuse a tensor that is not one block of values of its dtype.

    Raises:
        CollectiveError: it is a DTensor, sparse, nested or quantized.
    """
    if leaf.is_nested:
        found, instead = "a nested tensor", "to_padded_tensor(0.0)"
    elif leaf.layout is not torch.strided:
        found, instead = f"a tensor of layout {leaf.layout}", "to_dense()"
    elif leaf.is_quantized:  # by torch's own dtypes
        found, instead = "a quantized tensor", "dequantize()"
    elif type(leaf) is not Tensor and hasattr(leaf, "device_mesh"):
        found, instead = "a DTensor", "full_tensor(), which all ranks call, or its to_local()"
    else:
        return
    raise CollectiveError(f"Collectives do not take {found}. Pass its {instead}.")


def call_signature(packed: Packed, extra: str = "") -> str:
    """Structure, dtypes and shapes as text: equal on ranks whose calls match."""
    kinds = [
        f"{_NAMES[t.dtype]}{[*t.shape]}" if t.is_cpu else f"{_NAMES[t.dtype]}{[*t.shape]}@device"
        for t in packed.tensors.values()
    ]
    structure = packed.shape.text if packed.shape.text != "*" else ""
    return ", ".join(part for part in (structure, " ".join(kinds), extra) if part)


def byte_size(tensors: Sequence[Tensor]) -> int:
    """The size of `to_bytes` of tensors like these."""
    return -(-sum([tensor.nbytes for tensor in tensors]) // _WIDEST) * _WIDEST


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of any dtypes into one uint8 tensor on their common device."""
    parts: list[Tensor] = []
    for places in _by_dtype(tensors).values():
        # One call of torch flattens and joins them all.
        flat = _flatten_dense_tensors([tensors[place] for place in places])
        if flat.is_conj() or flat.is_neg():  # lazy views, whose bytes are not their values
            flat = flat.resolve_conj().resolve_neg()
        parts.append(octets(flat))
    if not parts:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    if gap := -sum([part.numel() for part in parts]) % _WIDEST:
        parts.append(parts[0].new_empty(gap))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def octets(flat: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes, since libraries lack some dtypes.

    Args:
        flat: 1-D. A single value may have any stride, such as that of a column of one row, with
            which torch refuses a view of another dtype.
    """
    flat = flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def unpack_ranks(rows: Tensor, like: Sequence[Tensor], *, joined: bool = False) -> list[Tensor]:
    """Unpack buffers of several ranks that `to_bytes` made.

    Args:
        rows: uint8, (ranks, bytes), each row from tensors like these.
        joined: Concatenate the ranks' tensors instead of stacking them.

    Returns:
        For each tensor, in its dtype, as `split_rows` gives it.
    """
    out: dict[int, Tensor] = {}
    start = 0
    for dtype, places in _by_dtype(like).items():
        group = [like[place] for place in places]
        size = sum([tensor.nbytes for tensor in group])
        section = rows[:, start : start + size]
        if rows.stride(0) % dtype.itemsize or section.storage_offset() % dtype.itemsize:
            section = section.clone(memory_format=torch.contiguous_format)
        # An empty tensor cannot be viewed as a wider dtype.
        typed = section.view(dtype) if size else section.to(dtype)
        out |= zip(places, split_rows(typed, group, joined=joined), strict=True)
        start += size
    return [out[place] for place in range(len(like))]


def split_rows(rows: Tensor, like: Sequence[Tensor], *, joined: bool) -> list[Tensor]:
    """Split rows of several ranks into tensors of one dtype.

    Args:
        rows: (ranks, entries), each row the concatenation of tensors like these.
        joined: Concatenate the ranks' tensors instead of stacking them.

    Returns:
        For each tensor (ranks, *its shape); joined (ranks · n, ...), in which a 0-d tensor counts
        as one row.
    """
    ranks = rows.shape[0]
    # Joined rows of several tensors are copied in any case, by one call of torch for all.
    copies = joined and not (len(like) == 1 and rows.is_contiguous())
    split: Any = torch.split_with_sizes_copy if copies else torch.split_with_sizes
    parts = split(rows, [tensor.numel() for tensor in like], dim=1)
    out: list[Tensor] = []
    for part, tensor in zip(parts, like, strict=True):
        first, *rest = tensor.shape if joined and tensor.ndim else (1, *tensor.shape)
        out.append(part.view(ranks * first, *rest))  # a third faster than of a tuple
    return out


def from_bytes(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """New tensors from one buffer that `to_bytes` made from tensors like these."""
    return [column[0] for column in unpack_ranks(flat[None], like)]


def _by_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    """Places by dtype, the widest first, so that each begins at a multiple of its size."""
    groups: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(place)
    if len(groups) == 1:
        return groups
    return {dtype: groups[dtype] for dtype in sorted(groups, key=lambda d: -d.itemsize)}


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
        return torch.tensor(leaf, dtype=dtype, device="cpu"), Tensor.item
    if kind is complex:
        return torch.tensor(leaf, dtype=torch.complex128, device="cpu"), Tensor.item
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


def _array(tensor: Tensor) -> Any:  # a function of this module, which pickles by its name
    return tensor.numpy()


def _scalar(tensor: Tensor) -> Any:
    return tensor.numpy()[()]
