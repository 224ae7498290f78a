"""Trees to flat buffers and back."""

import ctypes
import math
import pickle
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain import _tree

__all__ = ["Packed", "dump", "from_bytes", "load", "pack", "signature", "to_bytes"]

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
        f"{str(t.dtype)[6:]}{list(t.shape)}{'' if t.device.type == 'cpu' else '@device'}"
        for t in packed.tensors.values()
    ]
    structure = packed.shape.text if packed.shape.text != "*" else ""
    return ", ".join(part for part in (structure, " ".join(kinds), extra) if part)


def to_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of any dtypes into one uint8 tensor on their common device."""
    if len(tensors) == 1:
        return _as_bytes(tensors[0])
    parts: list[Tensor] = []
    for tensor in tensors:
        flat = _as_bytes(tensor)
        parts.append(flat)
        if gap := -flat.numel() % _ALIGN:
            parts.append(flat.new_empty(gap))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def from_bytes(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views into a buffer that `to_bytes` made from tensors like these."""
    if flat.storage_offset() % _ALIGN:
        flat = flat.clone()
    sizes = [tensor.numel() * tensor.element_size() for tensor in like]
    if len({tensor.dtype for tensor in like}) == 1 and not any(n % _ALIGN for n in sizes):
        parts = flat[: sum(sizes)].view(like[0].dtype).split([t.numel() for t in like])
        return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
    out: list[Tensor] = []
    offset = 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        out.append(flat[offset : offset + size].view(tensor.dtype).view(tensor.shape))
        offset += math.ceil(size / _ALIGN) * _ALIGN
    return out


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


def _as_bytes(tensor: Tensor) -> Tensor:
    if tensor.is_conj() or tensor.is_neg():  # lazy views, whose bytes are not their values
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.reshape(-1).view(torch.uint8)
