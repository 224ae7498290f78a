"""Padding ragged tensors."""

from typing import Any, Generic, TypeVar

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fxtrain._display import describe
from fxtrain.errors import DataError
from fxtrain.ops.transport.exchange import exchange_payloads
from fxtrain.ops.transport.mismatches import check_is_context
from fxtrain.ops.transport.packing import pack
from fxtrain.state import DistContext

_STATIC = {"static": True}
T = TypeVar("T")


@attrs.frozen(kw_only=True, eq=False)
class Padded(Generic[T]):
    """A tree whose tensors were padded to the same length on every rank; itself a tree.

    Attributes:
        data: The padded tree.
        lengths: For each tensor leaf, its length on each rank before padding; equal on every
            rank.
        heads: First size of each padded tensor leaf, by which `unpad` recognises a gather.
        dim: The dimension that was padded.
        first: Whether the padding is at its beginning.
    """

    data: T = attrs.field(repr=describe)
    lengths: tuple[tuple[int, ...], ...] = attrs.field(metadata=_STATIC)
    heads: tuple[int, ...] = attrs.field(metadata=_STATIC)
    dim: int = attrs.field(metadata=_STATIC)
    first: bool = attrs.field(default=False, metadata=_STATIC)


def pad(
    tree: T, ctx: DistContext, dim: int = 0, value: float = 0, *, first: bool = False
) -> Padded[T]:
    """Pad tensors to the same length on every rank, at the end of one dimension.

    Args:
        tree: Nested containers; tensors and NumPy arrays of numbers may differ between ranks
            only in their length along `dim`. Those without that dimension, and other leaves,
            are unchanged.
        dim: The dimension to pad; a negative one counts from the end.
        value: The padding value.
        first: Pad at the beginning of the dimension, as prompts for `generate` are.

    Returns:
        The padded tree with every rank's lengths; `.data` is the tree itself. To join ragged
        tensors of all ranks, gather it and `unpad` the result.

    Effects:
        One exchange of packets, with 8 bytes per tensor; none at one rank.

    Raises:
        CollectiveError: ranks differ in more than the length; on every rank.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     padded = fx.ops.pad(torch.arange(3), ctx)
        ...     fx.ops.unpad(fx.ops.gather(padded, ctx), ctx), padded.lengths
        (tensor([0, 1, 2]), ((3,),))
    """
    check_is_context("pad", ctx)
    packed = pack(tree)
    tensors = list(packed.tensors.values())
    mine = [t.shape[dim] if _has_dim(t, dim) else -1 for t in tensors]
    ranks = [mine]
    if ctx.world_size > 1:
        payload = torch.tensor(mine, dtype=torch.int64, device="cpu").view(torch.uint8)
        call = (
            "pad",
            f"{packed.shape.text} {[_signature_without_dim(t, dim) for t in tensors]}, dim={dim}, "
            f"first={first}",
        )
        rows = exchange_payloads(ctx, call, payload)
        ranks = [row.clone().view(torch.int64).tolist() for row in rows]
    lengths = tuple(zip(*ranks, strict=True)) if mine else ()
    padded = [
        extend(tensor, dim, max(all_ranks), value, first=first)
        for tensor, all_ranks in zip(tensors, lengths, strict=True)
    ]
    leaves = packed.others | dict(zip(packed.tensors, padded, strict=True))
    heads = tuple(tensor.shape[0] if tensor.ndim else 1 for tensor in padded)
    return Padded(data=packed.rebuild(leaves), lengths=lengths, heads=heads, dim=dim, first=first)


def unpad(padded: Padded[T], ctx: DistContext) -> T:
    """Remove the padding, before or after a gather.

    Args:
        padded: The output of `pad`, or a gather of it over the same context.

    Returns:
        This rank's original tree; after a gather, each tensor with all ranks' real entries.

    Raises:
        DataError: gathered tensors that were padded in a dimension other than the first cannot
            be concatenated without their padding.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.unpad(fx.ops.pad([torch.ones(2)], ctx), ctx)
        [tensor([1., 1.])]
    """
    packed = pack(padded.data)
    out: dict[int, Any] = dict(packed.others)
    for index, (place, tensor) in enumerate(packed.tensors.items()):
        lengths = padded.lengths[index]
        out[place] = tensor if lengths[0] < 0 else _unpad_leaf(tensor, padded, index, ctx)
    return packed.rebuild(out)


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.ndim <= dim < tensor.ndim


def _signature_without_dim(tensor: Tensor, dim: int) -> str:
    """Dtype and shape without the padded dimension, which may differ between ranks."""
    shape: list[Any] = list(tensor.shape)
    if _has_dim(tensor, dim):
        shape[dim] = "?"
    return f"{str(tensor.dtype)[6:]}{shape}"


def extend(tensor: Tensor, dim: int, length: int, value: float, *, first: bool = False) -> Tensor:
    """Pad a tensor in one dimension; a tensor without that dimension is unchanged."""
    if not _has_dim(tensor, dim) or tensor.shape[dim] >= length:
        return tensor
    if not tensor.numel():  # torch 2.9 cannot pad empty tensors
        shape = list(tensor.shape)
        shape[dim] = length
        return tensor.new_full(shape, value)
    behind = tensor.ndim - 1 - dim % tensor.ndim
    gap = length - tensor.shape[dim]
    return F.pad(tensor, (0, 0) * behind + ((gap, 0) if first else (0, gap)), value=value)


def _unpad_leaf(tensor: Tensor, padded: Padded[Any], index: int, ctx: DistContext) -> Tensor:
    lengths, head, dim = padded.lengths[index], padded.heads[index], padded.dim
    world_size = len(lengths)
    if tensor.shape[0] == head:
        return _real(tensor, padded, lengths[ctx.rank])
    if tensor.shape[0] != head * world_size:
        raise DataError(
            f"unpad: found a tensor of shape {list(tensor.shape)}, expected {head} rows as "
            f"returned by pad, or {head * world_size} as gathered over {world_size} ranks. "
            f"Pass either."
        )
    parts = tensor.split(head)
    if dim % tensor.ndim and len(set(lengths)) > 1:
        raise DataError(
            f"unpad: ranks have lengths {list(lengths)} along dim {dim}, so their rows cannot be "
            f"concatenated without padding. Keep the padding, or unpad before the gather."
        )
    return torch.cat(
        [_real(part, padded, length) for part, length in zip(parts, lengths, strict=True)]
    )


def _real(tensor: Tensor, padded: Padded[Any], length: int) -> Tensor:
    """A rank's tensor without its padding."""
    start = tensor.shape[padded.dim] - length if padded.first else 0
    return tensor.narrow(padded.dim, start, length)
