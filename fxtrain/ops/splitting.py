"""Shares of sequences, and of tensors as torch cuts them."""

import sys
from collections.abc import Mapping, Sequence, Sized
from typing import Any, TypeVar, overload

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from fxtrain.errors import DataError
from fxtrain.ops.transport.arrays import is_array
from fxtrain.ops.transport.mismatches import check_is_context
from fxtrain.state import DistContext

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
    check_is_context("split", ctx)
    length = length_of(value)
    share, extra = divmod(length, ctx.world_size)
    start = ctx.rank * share + min(ctx.rank, extra)
    stop = start + share + (ctx.rank < extra)
    missing = share + (extra > 0) - (stop - start) if pad and length else 0
    return select(value, [*range(start, stop), *[length - 1] * missing])


def length_of(value: Any) -> int:
    """The number of items to split.

    Raises:
        DataError: the value has no items, their number is unknown, or the entries of a dict
            differ in length.
    """
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


def chunk_of(tensor: Tensor, n: int, dim: int, index: int) -> Tensor:
    """One of the chunks that `torch.chunk` makes, without the others.

    Returns:
        A view. It is empty along `dim` where torch makes fewer chunks than requested, since the
        dimension is short.

    Example:
        >>> import torch
        >>> [chunk_of(torch.arange(5), 4, 0, index).tolist() for index in range(4)]
        [[0, 1], [2, 3], [4], []]
    """
    length = tensor.size(dim)
    size = -(-length // n)
    start = min(index * size, length)
    return tensor.narrow(dim, start, min(size, length - start))
