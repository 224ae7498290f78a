"""Collectives of tensors that do not fit in a packet.

They are sent in pieces: as bytes, or as values of one dtype on XLA devices, which give no access to
the bytes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain.ops.transport.exchange import Call, rank_loss_guard
from fxtrain.ops.transport.packing import byte_size, from_bytes, split_rows, to_bytes, unpack_ranks
from fxtrain.state import DistContext

PIECE_BYTES = 256 * 2**20

# NCCL receives a list of tensors in a buffer of its own, and copies them from there. torch 2.13
# renamed the function that does without, and warns about the older name.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def in_pieces(
    ctx: DistContext,
    call: Call,
    tensors: Sequence[Tensor],
    run: Callable[[list[Tensor], Any], list[Tensor]],
    *,
    by_dtype: bool = False,
) -> list[Tensor]:
    """Carry out a collective of many tensors.

    A collective of many tensors copies them into a buffer and out of one; of one tensor it needs
    neither. So the memory beyond arguments and results does not grow with the tree.

    Args:
        call: For the error if a rank never joins.
        run: The collective of one of `pieces` over a group; returns as many tensors.
        by_dtype: As for `pieces`.
    """
    out: dict[int, Tensor] = {}
    for places in pieces(tensors, by_dtype=by_dtype):
        piece = [tensors[place] for place in places]
        group = ctx.comm.control if piece[0].device.type == "cpu" else ctx.comm.group
        with rank_loss_guard(ctx, call):
            out |= zip(places, run(piece, group), strict=True)
    return [out[place] for place in range(len(tensors))]


def pieces(tensors: Sequence[Tensor], *, by_dtype: bool = False) -> list[list[int]]:
    """The places of tensors that are sent together: those of one device, in order.

    Each piece but that of a single tensor has `PIECE_BYTES` at most.

    Args:
        by_dtype: Whether each piece has one dtype, as it always has on XLA devices.
    """
    out: list[list[int]] = []
    last: dict[Any, tuple[list[int], int]] = {}  # by kind, its last piece and the bytes of that
    for place, tensor in enumerate(tensors):
        device = tensor.device.type
        kind = (device, tensor.dtype if by_dtype or device == "xla" else None)
        piece, size = last.get(kind, ([], 0))
        if not piece or size + tensor.nbytes > PIECE_BYTES:
            piece, size = [], 0
            out.append(piece)
        piece.append(place)
        last[kind] = piece, size + tensor.nbytes
    return out


def gather_piece(piece: list[Tensor], ranks: int, group: Any, *, joined: bool) -> list[Tensor]:
    """Each tensor of all ranks, as `split_rows` gives it.

    Effects:
        One all-gather.
    """
    flat = _flattened(piece)
    if flat.device.type == "xla":
        received = [torch.empty_like(flat) for _ in range(ranks)]
        dist.all_gather(received, flat, group=group)
        return split_rows(torch.stack(received), piece, joined=joined)
    rows = flat.new_empty((ranks, flat.numel()))
    if flat.is_cpu:
        dist.all_gather(list(rows), flat, group=group)
    else:
        _gather_into(rows.view(-1), flat, group=group)
    return unpack_ranks(rows, piece, joined=joined)


def broadcast_piece(piece: list[Tensor], src: int, group: Any, *, sends: bool) -> list[Tensor]:
    """The tensors of one rank, given by its global rank.

    Args:
        sends: This is that rank. The values of others are not read.

    Effects:
        One broadcast.
    """
    if piece[0].device.type == "xla":
        flat = _flattened(piece).clone()
        dist.broadcast(flat, src=src, group=group)
        return [rows[0] for rows in split_rows(flat[None], piece, joined=False)]
    if sends:
        flat = _flattened(piece)
        flat = flat.clone() if len(piece) == 1 else flat
    else:
        size = piece[0].nbytes if len(piece) == 1 else byte_size(piece)
        flat = torch.empty(size, dtype=torch.uint8, device=piece[0].device)
    dist.broadcast(flat, src=src, group=group)
    return from_bytes(flat, piece)


def _flattened(piece: list[Tensor]) -> Tensor:
    """As `to_bytes`; those of a single contiguous tensor without a copy, and without padding."""
    if piece[0].device.type == "xla":
        return torch.cat([tensor.reshape(-1) for tensor in piece])
    if len(piece) > 1:
        return to_bytes(piece)
    return piece[0].resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
