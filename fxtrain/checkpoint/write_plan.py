"""Who writes what: every number of a state once, spread evenly over the ranks that hold it."""

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fxtrain._errors import CheckpointError
from fxtrain.models.tensor_bytes import dtype_name
from fxtrain.state import FlatShard

__all__ = [
    "TensorChunk",
    "assign_writers",
    "box_of",
    "boxes_in",
    "boxes_of",
    "rank_chunks",
    "writable_chunks",
]

Box = tuple[tuple[int, ...], tuple[int, ...]]


@attrs.frozen(kw_only=True, eq=False)
class TensorChunk:
    """What one rank writes of one tensor.

    Attributes:
        name: Of the tensor.
        dtype: Its name in the manifest.
        full_shape: Shape over all ranks.
        start: Where the piece stands in it.
        tensor: The values, of the piece's shape, on any device.
        own: The tensor belongs to this rank alone.
    """

    name: str
    dtype: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor
    own: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return self.tensor.numel() * self.tensor.element_size()


def writable_chunks(tensors: Mapping[str, Tensor | FlatShard]) -> dict[str, TensorChunk]:
    """What this rank could write of tensors that are the same on all ranks, or spread over them.

    Returns:
        By a key that equal pieces of two ranks share.

    Raises:
        CheckpointError: a tensor cannot be written; its name is in the message.
    """
    found: dict[str, TensorChunk] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, FlatShard):
            found |= {f"{name}@{piece.start}": piece for piece in _flat_chunks(name, tensor)}
        elif not isinstance(tensor, DTensor):
            found[name] = _plain(name, tensor)
        elif (piece := _dtensor_chunks(name, tensor)) is not None:
            found[f"{name}@{piece.start}"] = piece
    return found


def assign_writers(
    sizes: Mapping[str, int], holders: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Which rank writes which piece: one that holds it, and evenly.

    Args:
        sizes: Bytes, by key; equal on every rank, like all of this.
        holders: Ranks that have the piece, by key.
    """
    load = dict.fromkeys((rank for ranks in holders.values() for rank in ranks), 0)
    chosen: dict[str, int] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        chosen[key] = min(holders[key], key=lambda rank: (load[rank], rank))
        load[chosen[key]] += sizes[key]
    return chosen


def rank_chunks(tensors: Mapping[str, Tensor]) -> list[TensorChunk]:
    """All of the tensors that belong to this rank alone."""
    return [attrs.evolve(_plain(name, tensor), own=True) for name, tensor in tensors.items()]


def box_of(tensor: DTensor) -> Box:
    """(start, shape) of this rank's part of a spread tensor."""
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(start), tuple(shape)


def boxes_of(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """The elements from `begin` up to `end` of a tensor, in order, as (start, shape) of boxes."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # of the whole rows
    if first > last:  # inside of one row
        yield from _in_row(shape, last, begin, end)
        return
    yield from _in_row(shape, first - 1, begin, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from _in_row(shape, last, last * row, end)


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> Iterator[Box]:
    before = row * math.prod(shape[1:])
    for start, size in boxes_of(shape[1:], begin - before, end - before):
        yield (row, *start), (1, *size)


def boxes_in(part: FlatShard) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Views of a stretch as boxes, each with its place in the whole tensor."""
    values, at = part.values.detach(), 0
    for start, shape in boxes_of(part.shape, part.start, part.start + len(values)):
        size = math.prod(shape)
        yield start, values[at : at + size].view(shape)
        at += size


def _flat_chunks(name: str, part: FlatShard) -> Iterator[TensorChunk]:
    """This rank's part, in boxes, of which files are made."""
    dtype = dtype_name(part.values, name)
    for start, box in boxes_in(part):
        yield TensorChunk(name=name, dtype=dtype, full_shape=part.shape, start=start, tensor=box)


def _plain(name: str, tensor: Tensor) -> TensorChunk:
    shape = tuple(tensor.shape)
    return TensorChunk(
        name=name,
        dtype=dtype_name(tensor, name),
        full_shape=shape,
        start=(0,) * len(shape),
        tensor=tensor.detach(),
    )


def _dtensor_chunks(name: str, tensor: DTensor) -> TensorChunk | None:
    """This rank's part, where it has one."""
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(
            f"{name} is a DTensor with unreduced (Partial) values. Redistribute it first."
        )
    if tensor.device_mesh.get_coordinate() is None:
        return None
    start, shape = box_of(tensor)
    local = tensor.to_local().detach()
    if 0 in shape:
        return None
    return TensorChunk(
        name=name,
        dtype=dtype_name(local, name),
        full_shape=tuple(tensor.shape),
        start=start,
        tensor=local,
    )
