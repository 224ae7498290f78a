"""Padding ragged tensors, and gathering rows without padding."""

import sys
from collections.abc import Sized
from typing import Any, Generic, TypeVar

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from fxtrain import _tree
from fxtrain._display import brief, counted
from fxtrain.errors import DataError
from fxtrain.ops.collectives import gather_packed
from fxtrain.ops.same_errors import fail_together
from fxtrain.ops.transport.exchange import exchange_payloads
from fxtrain.ops.transport.packing import Back, as_tensor, is_array, pack, packed_leaves
from fxtrain.state import Batch, DistContext
from fxtrain.state.context import check_connected

_STATIC = {"static": True}
T = TypeVar("T")
_HINT = (
    "Put one entry per row into a list; put columns, and values of the batch, into a tuple or "
    "a dict."
)


@attrs.frozen(kw_only=True, eq=False)
class Padded(Generic[T]):
    """A tree whose tensors were padded to the same length on every rank; itself a tree.

    Attributes:
        data: The padded tree.
        lengths: For each tensor leaf, its length on each rank before padding; equal on every
            rank.
        heads: First size of each padded tensor leaf, by which `unpad` recognizes a gather.
        dim: The dimension that was padded.
        first: Whether the padding is at its beginning.
    """

    data: T = attrs.field(repr=brief)
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
    check_connected("pad", ctx)
    packed = pack(tree)
    tensors = list(packed.tensors.values())
    local = [t.shape[dim] if _has_dim(t, dim) else -1 for t in tensors]
    ranks = [local]
    if ctx.world_size > 1:
        payload = torch.tensor(local, dtype=torch.int64, device="cpu").view(torch.uint8)
        call = (
            "pad",
            f"{packed.shape.text} {[_signature_without_dim(t, dim) for t in tensors]}, dim={dim}, "
            f"first={first}",
        )
        rows = exchange_payloads(ctx, call, payload)
        ranks = [row.clone().view(torch.int64).tolist() for row in rows]
    lengths = tuple(zip(*ranks, strict=True)) if local else ()
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


def gather_valid(tree: T, batch: Batch, ctx: DistContext) -> T:
    """Gather per-row results of a batch, without padding rows.

    Over an epoch this returns exactly the rows of the data, once each, in order. Whether a value
    is per row depends on its type only, never on a length that happens to match:

    - A list has one entry per row. The entries may be anything: numbers, strings, dicts, lists,
      tuples, tensors of any shape. A tuple of strings counts as a list, since torch's collate
      makes one.
    - A tensor or NumPy array is a column: its first dimension is the rows.
    - Tuples, dicts and records are structure, with columns and lists inside.
    - A 0-d tensor, a number, a string or any other object is one value of this rank's batch.

    Args:
        tree: Results for this rank's rows, including padding.
        batch: The batch of these results.

    Returns:
        A new tree, equal on every rank: columns and lists concatenated without padding. Values
        of a batch come from the ranks with a real row, concatenated (0-d tensors and NumPy
        scalars) or in a list (others). So `(correct, total)` stays a pair. Tensors in lists
        are on the CPU or the context's device, as before.

    Effects:
        As `gather`.

    Raises:
        DataError: a tensor, array or list has a different number of rows, or a leaf has a length
            but is none of the above, such as a set. Other ranks raise a CollectiveError.
        CollectiveError: the ranks disagree or one never joins; on every rank.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     for batch in fx.shard(DataLoader(torch.arange(5), batch_size=3), ctx):
        ...         boxes = [{"id": int(i), "box": torch.ones(int(i), 4)} for i in batch.data]
        ...         doubled, found = fx.ops.gather_valid((batch.data * 2, boxes), batch, ctx)
        ...         doubled, [len(one["box"]) for one in found]
        (tensor([0, 2, 4]), [0, 1, 2])
        (tensor([6, 8]), [3, 4])
    """
    check_connected("gather_valid", ctx)
    here = ctx.axis("data") if len(batch.sizes) != ctx.world_size else ctx
    leaves, shape = _tree.flatten(tree, _is_rows)
    rows_of_batch = len(batch.valid)
    problem = next(
        (found for leaf in leaves if (found := _leaf_problem(leaf, rows_of_batch))), None
    )
    if problem is not None:
        with fail_together(here):
            raise DataError(f"gather_valid: {problem} {_HINT}")
    back: dict[int, Back] = {}
    for place, leaf in enumerate(leaves):
        if found := as_tensor(leaf):
            leaves[place], back[place] = found
    got = _gathered(leaves, shape, batch, here) if leaves else []
    pairs = zip(leaves, got, strict=True)
    real = [_real_rows(leaf, found, batch) for leaf, found in pairs]
    for place, again in back.items():
        real[place] = again(real[place])
    return _tree.unflatten(shape, real)


def _gathered(
    leaves: list[Any], shape: _tree.TreeSpec, batch: Batch, ctx: DistContext
) -> list[Any]:
    """Columns of all ranks, padded and concatenated; of every other leaf the list of all ranks'."""
    # Placeholder rows (`even="uneven"`) have size 0, so they are not sent.
    size, longest = batch.sizes[ctx.rank], max(batch.sizes)
    kinds = [_kind(leaf) for leaf in leaves if not isinstance(leaf, Tensor)]
    text = " ".join([shape.text, *kinds])  # compared between ranks
    flat = _tree.TreeSpec(text, (_tree.TreeSpec("*"),) * len(leaves), rebuild=list)
    packed = packed_leaves([_to_send(leaf, size, longest) for leaf in leaves], flat)
    return gather_packed("gather_valid", packed, ctx)


def _kind(leaf: Any) -> str:
    if _is_rows(leaf):
        return f"{'list' if isinstance(leaf, list) else 'tuple'} of rows"
    return f"array{list(leaf.shape[1:])}" if is_array(leaf) and leaf.ndim else "value"


def _is_rows(node: Any) -> bool:
    """Whether a container has one entry per row, rather than being structure."""
    if isinstance(node, list):
        return True
    return (
        type(node) is tuple and bool(node) and all(isinstance(entry, str | bytes) for entry in node)
    )


def _leaf_problem(leaf: Any, size: int) -> str | None:
    """Why a leaf is neither per row nor a value of the batch; None if it is either."""
    here = f"the batch has {counted(size, 'row')} on this rank."
    if isinstance(leaf, Tensor) or is_array(leaf):
        fits = not leaf.ndim or leaf.shape[0] == size
        kind = "a tensor" if isinstance(leaf, Tensor) else "an array"
        return None if fits else f"found {kind} of shape {list(leaf.shape)}, but {here}"
    if _is_rows(leaf):
        kind = type(leaf).__name__
        return None if len(leaf) == size else f"found a {kind} of {len(leaf)} entries, but {here}"
    if isinstance(leaf, Sized) and not isinstance(leaf, str | bytes):
        return (
            f"found a {type(leaf).__qualname__} of length {len(leaf)}, which may be per row or "
            f"not; {here}"
        )
    return None


def _to_send(leaf: Any, size: int, longest: int) -> Any:
    """A leaf as it is sent: columns padded to one length, lists without padding rows."""
    if isinstance(leaf, Tensor):
        return extend(leaf.detach()[:size] if leaf.ndim else leaf.detach(), 0, longest, 0)
    if not _is_rows(leaf):
        return leaf
    leaf = leaf[:size]
    if any([isinstance(entry, Tensor) for entry in _tree.flatten(leaf)[0]]):
        return _tree.map_tensors(Tensor.detach, leaf)
    return leaf


def _real_rows(leaf: Any, gathered: Any, batch: Batch) -> Any:
    """The gathered leaf without padding rows."""
    some = [rank for rank, rows in enumerate(batch.rows) if rows]
    if isinstance(leaf, Tensor) and leaf.ndim == 0:
        return gathered if len(some) == len(batch.rows) else gathered[some]
    longest = max(batch.sizes)
    if isinstance(leaf, Tensor):
        if min(batch.rows) == longest:
            return gathered
        parts = gathered.split(longest) if longest else [gathered]
        return torch.cat([part[:rows] for part, rows in zip(parts, batch.rows, strict=False)])
    if _is_rows(leaf):
        rows = [row for part, n in zip(gathered, batch.rows, strict=True) for row in part[:n]]
        return rows if isinstance(leaf, list) else tuple(rows)
    if is_array(leaf) and leaf.ndim:
        numpy: Any = sys.modules["numpy"]
        return numpy.concatenate([part[:n] for part, n in zip(gathered, batch.rows, strict=True)])
    return [gathered[rank] for rank in some]
