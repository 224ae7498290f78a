"""Shares of sequences, and of tensors as torch cuts them; and trees that one rank sends out."""

import sys
from collections.abc import Mapping, Sequence, Sized
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import Dataset, IterableDataset, Subset

from fxtrain.errors import CollectiveError, DataError
from fxtrain.ops.transport.exchange import EMPTY, rank_loss_guard, send_payload
from fxtrain.ops.transport.mismatches import check_source_rank
from fxtrain.ops.transport.packing import is_array
from fxtrain.ops.transport.pickled import (
    dump,
    dump_or_raise,
    error_text,
    unpickle_all,
    unpickles_anywhere,
)
from fxtrain.state import DistContext
from fxtrain.state.context import check_connected

T = TypeVar("T")
V = TypeVar("V")


@overload
def split(value: Dataset[T], ctx: DistContext, *, pad: bool = False) -> Subset[T]: ...
@overload
def split(value: V, ctx: DistContext, *, pad: bool = False) -> V: ...
def split(value: Any, ctx: DistContext, *, pad: bool = False) -> Any:
    """This rank's share of a sequence, in order; the first ranks get the extra items.

    Args:
        value: A sequence, or a tensor or NumPy array (split along its first dimension), a
            map-style dataset of torch or of Hugging Face's datasets, or a dict of these of
            equal length.
        pad: Repeat the last item until all shares are equally long.

    Returns:
        A new value of the same type; the input is unchanged. A torch dataset becomes a
        `torch.utils.data.Subset`; a padded range, and any sequence but a list, tuple or range,
        becomes a list.

    Raises:
        DataError: the value cannot be split, or the entries of a dict differ in length.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.split(["a", "b", "c"], ctx)
        ['a', 'b', 'c']
    """
    check_connected("split", ctx)
    length = length_of(value)
    share, extra = divmod(length, ctx.world_size)
    start = ctx.rank * share + min(ctx.rank, extra)
    stop = start + share + (ctx.rank < extra)
    missing = share + (extra > 0) - (stop - start) if pad and length else 0
    return select(value, [*range(start, stop), *[length - 1] * missing])


def length_of(value: Any) -> int:
    """The number of items to split; a DataError if it is unknown, or entries of a dict differ."""
    if isinstance(value, Mapping):
        lengths = {key: length_of(entry) for key, entry in value.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"split: the entries of the dict have different lengths: {lengths}. Pass "
                f"entries of equal length, or split them one by one."
            )
        return max(lengths.values(), default=0)
    if isinstance(value, Tensor) or is_array(value):
        if value.ndim == 0:
            raise DataError(
                f"split: a 0-d {type(value).__name__} has no rows to split. Pass one with at "
                f"least one dimension."
            )
        return len(value)
    text = isinstance(value, str | bytes | bytearray)
    if isinstance(value, Sequence) and not text:
        return len(value)
    mapped = isinstance(value, Dataset) and not isinstance(value, IterableDataset)
    if isinstance(value, Sized) and (mapped or _is_hugging_face(value)):
        return len(value)
    named = f"{type(value).__module__}.{type(value).__qualname__}"
    raise DataError(
        f"split takes a list, tuple, tensor, NumPy array, a map-style dataset with a length, or "
        f"a dict of these; found {named}. For a stream use fx.shard(DataLoader(...), ctx); pass "
        f"anything else as a list of its items."
    )


def _is_hugging_face(value: Any) -> bool:
    datasets: Any = sys.modules.get("datasets")
    return datasets is not None and isinstance(value, datasets.Dataset)


def select(value: Any, places: list[int]) -> Any:
    """A new value with the items at these indices."""
    if isinstance(value, Mapping):
        return {key: select(entry, places) for key, entry in value.items()}
    if isinstance(value, Tensor):
        return value[torch.tensor(places, dtype=torch.int64, device=value.device)]
    if is_array(value):
        return value.take(places, axis=0)
    if isinstance(value, Dataset):
        return Subset(value, places)
    if _is_hugging_face(value):
        return value.select(places)
    start, stop = (places[0], places[-1] + 1) if places else (0, 0)
    if isinstance(value, range) and places == [*range(start, stop)]:
        return value[start:stop]
    taken = [value[place] for place in places]
    return tuple(taken) if isinstance(value, tuple) else taken


def shard_box(
    shape: Sequence[int], sizes: Sequence[int], place: Sequence[int], placements: Sequence[Any]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of the part of a DTensor that a rank holds.

    Args:
        shape: Of the whole tensor.
        sizes: Of the axes of its mesh.
        place: The rank's coordinate on each axis.
        placements: How each axis holds the tensor.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> shard_box((5, 2), (2, 4), (1, 1), (Replicate(), Shard(0)))
        ((2, 0), (2, 2))
    """
    start, part = [0] * len(shape), list(shape)
    axes = list(enumerate(placements))
    if any(hasattr(how, "split_factor") for how in placements):
        axes.reverse()  # a strided shard is a part of what later axes have split before
    for axis, how in axes:
        dim = getattr(how, "dim", None)
        if dim is not None:
            size = -(-part[dim] // sizes[axis])
            first = min(place[axis] * size, part[dim])
            start[dim], part[dim] = start[dim] + first, min(size, part[dim] - first)
    return tuple(start), tuple(part)


def chunk_of(tensor: Tensor, n: int, dim: int, index: int) -> Tensor:
    """One of the chunks that `torch.chunk` makes, as a view, without the others.

    It is empty along `dim` where torch makes fewer than requested, since the dimension is short.

    Example:
        >>> import torch
        >>> [chunk_of(torch.arange(5), 4, 0, index).tolist() for index in range(4)]
        [[0, 1], [2, 3], [4], []]
    """
    length = tensor.size(dim)
    size = -(-length // n)
    start = min(index * size, length)
    return tensor.narrow(dim, start, min(size, length - start))


def scatter(values: Sequence[T] | None, ctx: DistContext, src: int = 0) -> T:
    """Send a different tree from one rank to each rank.

    Args:
        values: On `src` one tree per rank, of any structure and shapes; ignored elsewhere.
        src: The rank of this context that sends.

    Returns:
        This rank's tree. Its tensors are new, on the CPU or on this context's device as they
        were on `src`, without gradient; NumPy values are new too.

    Effects:
        One exchange of packets, then one message from `src` to each other rank with that
        rank's tree. A second exchange if a tree contains objects that could fail to unpickle.

    Raises:
        CollectiveError: `src` does not pass one tree per rank, a rank cannot unpickle its tree,
            or a rank never joins; on every rank.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.scatter([{"x": torch.arange(2)}], ctx)
        {'x': tensor([0, 1])}
    """
    check_connected("scatter", ctx)
    check_source_rank("scatter", src, ctx)
    call = ("scatter", f"src={src}")
    blobs: list[Tensor] = []
    note = EMPTY
    if ctx.comm.simulated and ctx.rank != src:
        raise CollectiveError(
            f"scatter(src={src}): this is fake rank {ctx.rank}, and fake ranks receive no data. "
            f"Run as rank {src}, which sends."
        )
    if ctx.rank == src:
        try:
            problem = _trees_problem(values, ctx)
            blobs = [] if problem else [dump_or_raise(tree, ctx) for tree in values or ()]
        except Exception as error:  # code of the user's types may raise anything
            problem = (
                f"a tree that cannot be sent: {error_text(error)}. Send tensors, or objects that "
                f"pickle."
            )
        sure = all(map(unpickles_anywhere, blobs))
        note = dump(problem or ([blob.numel() for blob in blobs], sure), ctx)
    (received,) = unpickle_all("scatter", {src: send_payload(ctx, call, note, src)}, ctx)
    if isinstance(received, str):
        raise CollectiveError(f"scatter: rank {src} passed {received}")
    sizes, sure = received
    ranks, group = ctx.comm.ranks, ctx.comm.control
    with rank_loss_guard(ctx, call):
        if ctx.rank == src:
            others = [rank for rank in range(ctx.world_size) if rank != src]
            sent = [dist.isend(blobs[rank], dst=ranks[rank], group=group) for rank in others]
            for work in sent:
                if work is not None:
                    work.wait()
            data = blobs[src]
        else:
            data = torch.empty(sizes[ctx.rank], dtype=torch.uint8, device="cpu")
            dist.recv(data, src=ranks[src], group=group)
    (tree,) = unpickle_all("scatter", {src: data}, ctx, sure=sure)
    return tree


def _trees_problem(values: Any, ctx: DistContext) -> str:
    """Why values are not one tree per rank; empty if they are."""
    if isinstance(values, Sequence) and len(values) == ctx.world_size:
        return ""
    has = f"{len(values)} trees" if isinstance(values, Sequence) else type(values).__name__
    return f"{has} for {ctx.world_size} ranks. Pass a sequence of one tree per rank."
