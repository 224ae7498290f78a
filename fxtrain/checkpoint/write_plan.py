"""Assign every value of a state to one writer, balanced over the ranks that have it."""

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fxtrain._errors import CheckpointError
from fxtrain.models.tensor_bytes import dtype_name
from fxtrain.ops.whole_tensors import local_values
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
    """A box of a tensor that one rank writes.

    Attributes:
        name: Name of the tensor.
        dtype: Name of its dtype in the manifest.
        full_shape: Shape of the full tensor.
        start: Offset of the chunk in the full tensor, per dimension.
        tensor: The values, in the shape of the chunk, on any device.
        own: The tensor belongs only to this rank.
    """

    name: str
    dtype: str
    full_shape: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor
    own: bool = False

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.tensor.numel() * self.tensor.element_size()


def writable_chunks(tensors: Mapping[str, Tensor | FlatShard]) -> dict[str, TensorChunk]:
    """The chunks that this rank could write of replicated and sharded tensors.

    Returns:
        Chunks by a key that is equal for the same chunk on different ranks.

    Raises:
        CheckpointError: a tensor cannot be written; its name is in the message.
    """
    found: dict[str, TensorChunk] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, FlatShard):
            found |= {f"{name}@{chunk.start}": chunk for chunk in _flat_chunks(name, tensor)}
        elif not isinstance(tensor, DTensor):
            found[name] = _plain(name, tensor)
        elif (chunk := _dtensor_chunks(name, tensor)) is not None:
            found[f"{name}@{chunk.start}"] = chunk
    return found


def assign_writers(
    sizes: Mapping[str, int], holders: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Choose the rank that writes each chunk: one that has it, balanced by bytes.

    Args:
        sizes: Bytes by key. All arguments are equal on every rank.
        holders: Ranks that have the chunk, by key.
    """
    load = dict.fromkeys((rank for ranks in holders.values() for rank in ranks), 0)
    chosen: dict[str, int] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        chosen[key] = min(holders[key], key=lambda rank: (load[rank], rank))
        load[chosen[key]] += sizes[key]
    return chosen


def rank_chunks(tensors: Mapping[str, Tensor]) -> list[TensorChunk]:
    """Chunks of the tensors that belong only to this rank."""
    return [attrs.evolve(_plain(name, tensor), own=True) for name, tensor in tensors.items()]


def box_of(tensor: DTensor) -> Box:
    """(start, shape) of this rank's shard of a DTensor."""
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(start), tuple(shape)


def boxes_of(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Box]:
    """Boxes, as (start, shape), that cover the elements `begin` to `end` of a tensor in order."""
    if begin >= end:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # of the complete rows
    if first > last:  # inside one row
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
    """Views of a flat shard as boxes, each with its offset in the full tensor."""
    values, at = part.values.detach(), 0
    for start, shape in boxes_of(part.shape, part.start, part.start + len(values)):
        size = math.prod(shape)
        yield start, values[at : at + size].view(shape)
        at += size


def _flat_chunks(name: str, part: FlatShard) -> Iterator[TensorChunk]:
    """This rank's flat shard as boxes, since files contain boxes."""
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
    """This rank's shard, or None if it has none."""
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(
            f"{name} is a DTensor with unreduced (Partial) values. Redistribute it first."
        )
    if tensor.device_mesh.get_coordinate() is None:
        return None
    start, shape = box_of(tensor)
    local = local_values(tensor)
    if 0 in shape:
        return None
    return TensorChunk(
        name=name,
        dtype=dtype_name(local, name),
        full_shape=tuple(tensor.shape),
        start=start,
        tensor=local,
    )
