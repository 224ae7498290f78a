"""Trees to flat buffers and back."""

import ctypes
import pickle
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from fxtrain import _tree

__all__ = [
    "Packed",
    "columns",
    "dump",
    "from_bytes",
    "load",
    "pack",
    "places_in",
    "signature",
    "to_bytes",
]

_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_ALIGN = 16  # the widest dtype, complex128: a view needs an offset that divides by its size


@attrs.frozen(kw_only=True, eq=False)
class Packed:
    """A tree taken apart: tensors and other leaves, each with its place among the leaves.

    Attributes:
        shape: The structure of the tree.
        tensors: Detached tensor leaves, by place.
        others: Every other leaf, by place.
    """

    shape: _tree.Shape
    tensors: dict[int, Tensor]
    others: dict[int, Any]

    def rebuild(self, leaves: dict[int, Any]) -> Any:
        """A tree of this structure with other leaves."""
        return _tree.unflatten(self.shape, [leaves[place] for place in range(len(leaves))])


def pack(tree: Any) -> Packed:
    """Take a tree apart."""
    leaves, shape = _tree.flatten(tree)
    tensors, others = {}, {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            tensors[place] = leaf.detach() if leaf.requires_grad else leaf
        else:
            others[place] = leaf
    return Packed(shape=shape, tensors=tensors, others=others)


def signature(packed: Packed, extra: str = "") -> str:
    """Structure, dtypes and shapes in words: equal on ranks whose calls fit together."""
    kinds = [
        f"{_NAMES[t.dtype]}{[*t.shape]}" if t.is_cpu else f"{_NAMES[t.dtype]}{[*t.shape]}@device"
        for t in packed.tensors.values()
    ]
    structure = packed.shape.text if packed.shape.text != "*" else ""
    return ", ".join(part for part in (structure, " ".join(kinds), extra) if part)


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of any dtypes into one uint8 tensor on their common device."""
    parts: list[Tensor] = []
    for places in _by_dtype(tensors).values():
        # One call of torch flattens and joins them all.
        flat = _flatten_dense_tensors([tensors[place] for place in places])
        if flat.is_conj() or flat.is_neg():  # lazy views, whose bytes are not their values
            flat = flat.resolve_conj().resolve_neg()
        flat = flat.view(torch.uint8)
        parts.append(flat)
        if gap := -flat.numel() % _ALIGN:
            parts.append(flat.new_empty(gap))
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def places_in(
    tensors: Sequence[Tensor],
) -> tuple[list[tuple[torch.dtype, list[int], int]], int]:
    """Where `to_bytes` puts tensors: dtype, places and first byte, and how many bytes there are."""
    found: list[tuple[torch.dtype, list[int], int]] = []
    start = 0
    for dtype, places in _by_dtype(tensors).items():
        found.append((dtype, places, start))
        size = sum([tensors[place].numel() for place in places]) * dtype.itemsize
        start += size + -size % _ALIGN
    return found, start


def columns(rows: Tensor, like: Sequence[Tensor], *, joined: bool = False) -> list[Tensor]:
    """Take buffers of several ranks that `to_bytes` made apart again.

    Args:
        rows: uint8, (ranks, bytes), each row from tensors like these.
        joined: Put the ranks' tensors one after the other instead of beside each other.

    Returns:
        For each tensor, in its dtype, (ranks, *its shape); joined (ranks · n, ...), in which
        a 0-d tensor counts as one row.
    """
    out: dict[int, Tensor] = {}
    ranks = len(rows)
    for dtype, places, start in places_in(like)[0]:
        shapes = [like[place].shape for place in places]
        counts = [shape.numel() for shape in shapes]
        size = sum(counts) * dtype.itemsize
        section = rows[:, start : start + size]
        if rows.stride(0) % dtype.itemsize or rows.storage_offset() % dtype.itemsize:
            section = section.clone(memory_format=torch.contiguous_format)
        # Bytes of nothing do not view as anything.
        typed = section.view(dtype) if size else section.to(dtype)
        # Joined rows are copied in any case: here by one call of torch for all tensors.
        split: Any = torch.split_with_sizes_copy if joined else torch.split_with_sizes
        for place, part, shape in zip(places, split(typed, counts, dim=1), shapes, strict=True):
            whole = (ranks * shape[0], *shape[1:]) if joined and shape else (ranks, *shape)
            out[place] = part.view(whole)
    return [out[place] for place in range(len(like))]


def from_bytes(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """New tensors from one buffer that `to_bytes` made from tensors like these."""
    return [column[0] for column in columns(flat[None], like)]


def dump(value: Any) -> Tensor:
    """Pickle a value for the other ranks of this very run, as uint8 on the CPU.

    A value that does not pickle becomes its error, so that the ranks still meet; `load`
    raises it everywhere.
    """
    try:
        data = pickle.dumps((True, value), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # pickle raises whatever __reduce__ does
        data = pickle.dumps((False, f"{type(error).__name__}: {error}"))
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def load(data: Tensor) -> tuple[bool, Any]:
    """Whether the sender could pickle its value, and the value or the reason."""
    return pickle.loads(ctypes.string_at(data.data_ptr(), data.numel()))


def _by_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    """Places by dtype; the order of dtypes is that of their first tensor."""
    groups: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(place)
    return groups
