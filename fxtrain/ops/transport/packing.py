"""Trees to flat buffers and back."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from fxtrain import _tree
from fxtrain.ops.transport.arrays import Back, as_tensor, number_as_tensor

_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_ALIGN = 16  # of the widest dtype, complex128: a view's offset must be a multiple of its size


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
            tensors[place] = leaf.detach() if leaf.requires_grad else leaf
        elif found := as_tensor(leaf) or (number_as_tensor(leaf) if numbers else None):
            tensors[place], back[place] = found
        else:
            others[place] = leaf
    return Packed(shape=shape, tensors=tensors, others=others, back=back)


def signature(packed: Packed, extra: str = "") -> str:
    """Structure, dtypes and shapes as text: equal on ranks whose calls match."""
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
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device="cpu")


def byte_layout(
    tensors: Sequence[Tensor],
) -> tuple[list[tuple[torch.dtype, list[int], int]], int]:
    """Where `to_bytes` puts tensors: dtype, places and first byte; and the number of bytes."""
    found: list[tuple[torch.dtype, list[int], int]] = []
    start = 0
    for dtype, places in _by_dtype(tensors).items():
        found.append((dtype, places, start))
        size = sum([tensors[place].numel() for place in places]) * dtype.itemsize
        start += size + -size % _ALIGN
    return found, start


def unpack_ranks(rows: Tensor, like: Sequence[Tensor], *, joined: bool = False) -> list[Tensor]:
    """Unpack buffers of several ranks that `to_bytes` made.

    Args:
        rows: uint8, (ranks, bytes), each row from tensors like these.
        joined: Concatenate the ranks' tensors instead of stacking them.

    Returns:
        For each tensor, in its dtype, (ranks, *its shape); joined (ranks · n, ...), in which
        a 0-d tensor counts as one row.
    """
    out: dict[int, Tensor] = {}
    ranks = len(rows)
    for dtype, places, start in byte_layout(like)[0]:
        shapes = [like[place].shape for place in places]
        counts = [shape.numel() for shape in shapes]
        size = sum(counts) * dtype.itemsize
        section = rows[:, start : start + size]
        if rows.stride(0) % dtype.itemsize or rows.storage_offset() % dtype.itemsize:
            section = section.clone(memory_format=torch.contiguous_format)
        # An empty tensor cannot be viewed as a wider dtype.
        typed = section.view(dtype) if size else section.to(dtype)
        # Joined rows of several tensors are copied in any case, by one call of torch for all.
        copies = joined and not (len(places) == 1 and typed.is_contiguous())
        split: Any = torch.split_with_sizes_copy if copies else torch.split_with_sizes
        for place, part, shape in zip(places, split(typed, counts, dim=1), shapes, strict=True):
            full = (ranks * shape[0], *shape[1:]) if joined and shape else (ranks, *shape)
            out[place] = part.view(full)
    return [out[place] for place in range(len(like))]


def from_bytes(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """New tensors from one buffer that `to_bytes` made from tensors like these."""
    return [column[0] for column in unpack_ranks(flat[None], like)]


def _by_dtype(tensors: Sequence[Tensor]) -> dict[torch.dtype, list[int]]:
    """Places by dtype; the order of dtypes is that of their first tensor."""
    groups: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(place)
    return groups
