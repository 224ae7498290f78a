"""Who writes what: every number of a state once, spread evenly over the ranks that hold it."""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence

import attrs
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint._bytes import dtype_name

__all__ = ["Piece", "box_of", "own_pieces", "pieces_of"]


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


def pieces_of(
    tensors: Mapping[str, Tensor], rank: int, holders: Mapping[str, Sequence[int]]
) -> list[Piece]:
    """This rank's share of tensors that are the same on all ranks, or spread over them.

    Args:
        holders: Ranks that hold each plain tensor, the same on every rank.

    Raises:
        CheckpointError: a tensor cannot be written; its name is in the message.
    """
    found = [_spread(n, t) for n, t in tensors.items() if isinstance(t, DTensor)]
    plain = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in plain.items()}
    load = dict.fromkeys((rank for ranks in holders.values() for rank in ranks), 0)
    for name in sorted(plain, key=lambda name: (-sizes[name], name)):
        writer = min(holders[name], key=lambda rank: (load[rank], rank))
        load[writer] += sizes[name]
        if writer == rank:
            found.append(_plain(name, plain[name]))
    return [piece for piece in found if piece is not None]


def own_pieces(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """All of the tensors that belong to this rank alone."""
    return [attrs.evolve(_plain(name, tensor), own=True) for name, tensor in tensors.items()]


def box_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, shape) of this rank's part of a spread tensor."""
    shape, start = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(start), tuple(shape)


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
    """This rank's part, where it is this rank that writes it: replicas take turns."""
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(
            f"{name} is a DTensor with unreduced (Partial) values. Redistribute it first."
        )
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    replicas = [i for i, p in enumerate(tensor.placements) if isinstance(p, Replicate)]
    turn = zlib.crc32(name.encode()) % math.prod(_sizes(mesh.shape, replicas))
    for dim in replicas:
        turn, place = divmod(turn, mesh.shape[dim])
        if coordinate[dim] != place:
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


def _sizes(shape: Iterable[int], dims: list[int]) -> list[int]:
    sizes = list(shape)
    return [sizes[dim] for dim in dims]
