"""Who writes what: every number of a state once, spread evenly over the ranks that hold it."""

import math
from collections.abc import Iterator, Mapping, Sequence

import attrs
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fxtrain._errors import CheckpointError
from fxtrain.models.tensor_bytes import dtype_name
from fxtrain.state import Stretch

__all__ = ["Piece", "box_of", "boxes_in", "boxes_of", "offers_of", "own_pieces", "writers"]

Box = tuple[tuple[int, ...], tuple[int, ...]]


@attrs.frozen(kw_only=True, eq=False)
class Piece:
    """What one rank writes of one tensor.

    Attributes:
        name: Of the tensor.
        dtype: Its name in the manifest.
        whole: Shape over all ranks.
        start: Where the piece stands in it.
        tensor: The values, of the piece's shape, on any device.
        own: The tensor belongs to this rank alone.
    """

    name: str
    dtype: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    tensor: Tensor
    own: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return self.tensor.numel() * self.tensor.element_size()


def offers_of(tensors: Mapping[str, Tensor | Stretch]) -> dict[str, Piece]:
    """What this rank could write of tensors that are the same on all ranks, or spread over them.

    Returns:
        By a key that equal pieces of two ranks share.

    Raises:
        CheckpointError: a tensor cannot be written; its name is in the message.
    """
    found: dict[str, Piece] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, Stretch):
            found |= {f"{name}@{piece.start}": piece for piece in _stretched(name, tensor)}
        elif not isinstance(tensor, DTensor):
            found[name] = _plain(name, tensor)
        elif (piece := _spread(name, tensor)) is not None:
            found[f"{name}@{piece.start}"] = piece
    return found


def writers(sizes: Mapping[str, int], holders: Mapping[str, Sequence[int]]) -> dict[str, int]:
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


def own_pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
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


def boxes_in(part: Stretch) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Views of a stretch as boxes, each with its place in the whole tensor."""
    values, at = part.values.detach(), 0
    for start, shape in boxes_of(part.shape, part.start, part.start + len(values)):
        size = math.prod(shape)
        yield start, values[at : at + size].view(shape)
        at += size


def _stretched(name: str, part: Stretch) -> Iterator[Piece]:
    """This rank's part, in boxes, of which files are made."""
    dtype = dtype_name(part.values, name)
    for start, box in boxes_in(part):
        yield Piece(name=name, dtype=dtype, whole=part.shape, start=start, tensor=box)


def _plain(name: str, tensor: Tensor) -> Piece:
    shape = tuple(tensor.shape)
    return Piece(
        name=name,
        dtype=dtype_name(tensor, name),
        whole=shape,
        start=(0,) * len(shape),
        tensor=tensor.detach(),
    )


def _spread(name: str, tensor: DTensor) -> Piece | None:
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
    return Piece(
        name=name,
        dtype=dtype_name(local, name),
        whole=tuple(tensor.shape),
        start=start,
        tensor=local,
    )
