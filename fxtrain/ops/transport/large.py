"""Collectives of tensors that do not fit in a packet.

They are sent as bytes, or as values on XLA devices, which give no access to the bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain.ops.transport.packing import (
    by_dtype,
    byte_layout,
    from_bytes,
    to_bytes,
    unpack_ranks,
)

PIECE_BYTES = 256 * 2**20

# NCCL receives a list of tensors in a buffer of its own, and copies them from there. torch 2.13
# renamed the function that does without, and warns about the older name.
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def pieces(tensors: Sequence[Tensor], most: int = PIECE_BYTES) -> list[list[Tensor]]:
    """Split tensors, in order, so that each part but that of one tensor has `most` bytes at most.

    A collective of many tensors copies them into a buffer and out of one; of one tensor it needs
    neither. So the memory beyond arguments and results does not grow with the tree.
    """
    out: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not out or size + tensor.nbytes > most:
            out.append([])
            size = 0
        out[-1].append(tensor)
        size += tensor.nbytes
    return out


def gather_all(
    tensors: list[Tensor], ranks: int, group: Any, *, joined: bool, most: int = PIECE_BYTES
) -> list[Tensor]:
    """Each tensor of all ranks, as `unpack_ranks` gives it; all on one device.

    Effects:
        One all-gather for each of `pieces`.
    """
    if tensors[0].device.type == "xla":
        return gather_values(tensors, ranks, group, joined=joined)
    out: list[Tensor] = []
    for piece in pieces(tensors, most):
        flat = _bytes_of(piece)
        rows = flat.new_empty((ranks, flat.numel()))
        if flat.is_cpu:
            dist.all_gather(list(rows), flat, group=group)
        else:
            gather_into(rows.view(-1), flat, group=group)
        out += unpack_ranks(rows, piece, joined=joined)
    return out


def broadcast_all(
    tensors: list[Tensor], src: int, group: Any, *, sends: bool, most: int = PIECE_BYTES
) -> list[Tensor]:
    """The tensors of one rank, given by its global rank; all on one device.

    Args:
        sends: This is that rank. The values of others are not read.

    Effects:
        One broadcast for each of `pieces`.
    """
    if tensors[0].device.type == "xla":
        return broadcast_values(tensors, src, group)
    out: list[Tensor] = []
    for piece in pieces(tensors, most):
        if sends:
            flat = _bytes_of(piece)
            flat = flat.clone() if len(piece) == 1 else flat
        else:
            size = piece[0].nbytes if len(piece) == 1 else byte_layout(piece)[1]
            flat = torch.empty(size, dtype=torch.uint8, device=piece[0].device)
        dist.broadcast(flat, src=src, group=group)
        out += from_bytes(flat, piece)
    return out


def _bytes_of(piece: list[Tensor]) -> Tensor:
    """As `to_bytes`; those of a single contiguous tensor without a copy, and without padding."""
    if len(piece) > 1:
        return to_bytes(piece)
    return piece[0].resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def gather_values(tensors: list[Tensor], ranks: int, group: Any, *, joined: bool) -> list[Tensor]:
    """Each tensor of all ranks, (ranks, *its shape); joined (ranks · n, ...).

    Effects:
        One all-gather for each dtype.
    """
    out: dict[int, Tensor] = {}
    for places in by_dtype(tensors).values():
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        rows = [torch.empty_like(flat) for _ in range(ranks)]
        dist.all_gather(rows, flat, group=group)
        sizes = [tensors[place].numel() for place in places]
        for place, part in zip(places, torch.stack(rows).split(sizes, dim=1), strict=True):
            shape = tensors[place].shape
            full = (ranks * shape[0], *shape[1:]) if joined and shape else (ranks, *shape)
            out[place] = part.reshape(full)
    return [out[place] for place in range(len(tensors))]


def broadcast_values(tensors: list[Tensor], src: int, group: Any) -> list[Tensor]:
    """The tensors of one rank, given by its global rank.

    Effects:
        One broadcast for each dtype.
    """
    out: dict[int, Tensor] = {}
    for places in by_dtype(tensors).values():
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        dist.broadcast(flat, src=src, group=group)
        sizes = [tensors[place].numel() for place in places]
        for place, part in zip(places, flat.split(sizes), strict=True):
            out[place] = part.reshape(tensors[place].shape).clone()
    return [out[place] for place in range(len(tensors))]
