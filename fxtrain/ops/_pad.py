"""Ragged leaves, and the rows of a batch that are real."""

from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fxtrain import _tree
from fxtrain._errors import DataError
from fxtrain.ops._collect import gather
from fxtrain.ops._objects import Opaque, raise_together
from fxtrain.ops._pack import pack
from fxtrain.ops._views import known_context
from fxtrain.ops._wire import exchange
from fxtrain.state import Batch, DistContext

__all__ = ["Padded", "gather_valid", "pad", "unpad"]

_STATIC = {"static": True}


@attrs.frozen(kw_only=True, eq=False)
class Padded:
    """A tree whose tensors were made equally long on every rank; a tree like any other.

    Identity decides equality and hash, since tensors do not compare to a single truth.

    Attributes:
        data: The padded tree.
        lengths: For each tensor leaf, its length on each rank before; equal on every rank.
        heads: First size of each padded tensor leaf, by which a gather is recognised.
        dim: The dimension that was padded.
    """

    data: Any
    lengths: tuple[tuple[int, ...], ...] = attrs.field(metadata=_STATIC)
    heads: tuple[int, ...] = attrs.field(metadata=_STATIC)
    dim: int = attrs.field(metadata=_STATIC)


def pad(tree: Any, ctx: DistContext, dim: int = 0, value: float = 0) -> Padded:
    """Make tensors equally long on every rank, by padding at the end of one dimension.

    Args:
        tree: Nested containers; tensors may differ in length along `dim` between ranks, and
            in nothing else. Tensors without that dimension, and other leaves, stay.
        dim: The dimension to pad; negative counts from the end.
        value: What to pad with.

    Returns:
        The padded tree with every rank's lengths; `.data` is the tree itself. Gather it and
        `unpad` the result to join ragged tensors of all ranks.

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
    known_context("pad", ctx)
    packed = pack(tree)
    tensors = list(packed.tensors.values())
    mine = [t.shape[dim] if _has(t, dim) else -1 for t in tensors]
    ranks = [mine]
    if ctx.world_size > 1:
        payload = torch.tensor(mine, dtype=torch.int64).view(torch.uint8)
        call = ("pad", f"{packed.shape.text} {[_loose(t, dim) for t in tensors]}, dim={dim}")
        rows = exchange(ctx, call, payload)
        ranks = [row.clone().view(torch.int64).tolist() for row in rows]
    lengths = tuple(zip(*ranks, strict=True)) if mine else ()
    padded = [
        _extend(tensor, dim, max(all_ranks), value)
        for tensor, all_ranks in zip(tensors, lengths, strict=True)
    ]
    leaves = packed.others | dict(zip(packed.tensors, padded, strict=True))
    heads = tuple(tensor.shape[0] if tensor.ndim else 1 for tensor in padded)
    return Padded(data=packed.rebuild(leaves), lengths=lengths, heads=heads, dim=dim)


def unpad(padded: Padded, ctx: DistContext) -> Any:
    """Cut the padding off again, before or after a gather.

    Args:
        padded: What `pad` returned, or a gather of it along the same context.

    Returns:
        This rank's original tree, or, gathered, each tensor with all ranks' real entries.

    Raises:
        DataError: gathered tensors that were padded in a dimension other than the first do
            not fit together without their padding.

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
        out[place] = tensor if lengths[0] < 0 else _cut(tensor, padded, index, ctx)
    return packed.rebuild(out)


def gather_valid(tree: Any, batch: Batch, ctx: DistContext) -> Any:
    """Gather per-row results of a batch and keep the rows that are real.

    Over an epoch this gives exactly the rows of the data, once each, in order.

    Args:
        tree: Nested containers. A tensor whose first dimension is this rank's rows is per
            row; so is a list or tuple of other leaves of that length. A 0-d tensor or a
            single other leaf stands for the whole batch of this rank.
        batch: The batch that the results belong to.

    Returns:
        A new tree, equal on every rank: per-row leaves joined without padding; leaves per
        batch joined (tensors) or listed (others) over the ranks that had a real row.

    Effects:
        As `gather`.

    Raises:
        DataError: a tensor has another number of rows; on every rank that has it.
        CollectiveError: the ranks disagree or one did not come; on every rank.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     for batch in fx.shard(DataLoader(torch.arange(5), batch_size=3), ctx):
        ...         fx.ops.gather_valid(batch.data * 2, batch, ctx)
        tensor([0, 2, 4])
        tensor([6, 8])
    """
    known_context("gather_valid", ctx)
    here = ctx.axis("data") if len(batch.sizes) != ctx.world_size else ctx
    # Of rows that only stand in (`even="uneven"`) the size is 0: nothing of them is sent.
    size, longest = batch.sizes[here.rank], max(batch.sizes)
    there = len(batch.valid)
    leaves, shape = _tree.flatten(tree, lambda node: _is_column(node, there))
    _check_rows(leaves, there, here)
    sent = [
        _extend(leaf.detach()[:size] if leaf.ndim else leaf.detach(), 0, longest, 0)
        if isinstance(leaf, Tensor)
        else Opaque(leaf)
        for leaf in leaves
    ]
    got = gather(sent, here) if leaves else []
    pairs = zip(leaves, got, strict=True)
    return _tree.unflatten(shape, [_real(leaf, found, batch, longest) for leaf, found in pairs])


def _check_rows(leaves: list[Any], size: int, ctx: DistContext) -> None:
    """Refuse leaves that are not per row."""
    problem = None
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] != size:
            problem = DataError(
                f"gather_valid: a tensor of shape {list(leaf.shape)} is not per row: this "
                f"rank has {size} rows in the batch. Pass {size} rows, or a 0-d tensor."
            )
    if problem is not None:
        raise_together(problem, ctx)


def _real(leaf: Any, found: Any, batch: Batch, longest: int) -> Any:
    """The gathered leaf without what belongs to padding."""
    some = [rank for rank, rows in enumerate(batch.rows) if rows]
    if isinstance(leaf, Tensor) and leaf.ndim == 0:
        return found if len(some) == len(batch.rows) else found[some]
    if isinstance(leaf, Tensor):
        if min(batch.rows) == longest:
            return found
        parts = found.split(longest) if longest else [found]
        return torch.cat([part[:rows] for part, rows in zip(parts, batch.rows, strict=False)])
    values = [opaque.value for opaque in found]
    if isinstance(leaf, list | tuple):
        rows = [row for value, n in zip(values, batch.rows, strict=True) for row in value[:n]]
        return type(leaf)(rows)
    return [values[rank] for rank in some]


def _is_column(node: Any, size: int) -> bool:
    """Whether a list holds one object per row, rather than being a container of tensors."""
    return (
        type(node) in (list, tuple)
        and len(node) == size
        and size > 0
        and not any(isinstance(item, Tensor | list | tuple | dict) for item in node)
    )


def _has(tensor: Tensor, dim: int) -> bool:
    return -tensor.ndim <= dim < tensor.ndim


def _loose(tensor: Tensor, dim: int) -> str:
    """Dtype and shape without the length that may differ."""
    shape: list[Any] = list(tensor.shape)
    if _has(tensor, dim):
        shape[dim] = "?"
    return f"{str(tensor.dtype)[6:]}{shape}"


def _extend(tensor: Tensor, dim: int, length: int, value: float) -> Tensor:
    if not _has(tensor, dim) or tensor.shape[dim] >= length:
        return tensor
    if not tensor.numel():  # which torch 2.9 does not pad
        shape = list(tensor.shape)
        shape[dim] = length
        return tensor.new_full(shape, value)
    behind = tensor.ndim - 1 - dim % tensor.ndim
    gap = length - tensor.shape[dim]
    return F.pad(tensor, (0, 0) * behind + (0, gap), value=value)


def _cut(tensor: Tensor, padded: Padded, index: int, ctx: DistContext) -> Tensor:
    lengths, head, dim = padded.lengths[index], padded.heads[index], padded.dim
    world_size = len(lengths)
    if tensor.shape[0] == head:
        return tensor.narrow(dim, 0, lengths[ctx.rank])
    if tensor.shape[0] != head * world_size:
        raise DataError(
            f"unpad: a tensor of shape {list(tensor.shape)} is neither what pad returned nor "
            f"a gather of it over {world_size} ranks ({head} or {head * world_size} rows)."
        )
    parts = tensor.split(head)
    if dim % tensor.ndim and len(set(lengths)) > 1:
        raise DataError(
            f"unpad: ranks have the lengths {list(lengths)} along dim {dim}, so their rows do "
            f"not fit into one tensor without padding. Keep the padding, or unpad before."
        )
    return torch.cat(
        [part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)]
    )
