"""Collectives of tensors that do not fit in a packet.

They are sent as bytes, or as values on XLA devices, which give no access to the bytes.
"""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain.ops.transport.packing import from_bytes, to_bytes, unpack_ranks

__all__ = ["broadcast_all", "broadcast_values", "gather_all", "gather_values"]

# NCCL receives a list of tensors in a buffer of its own, and copies them from there. torch 2.13
# renamed the function that does without, and warns about the older name.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_all(tensors: list[Tensor], ranks: int, group: Any, *, joined: bool) -> list[Tensor]:
    """Each tensor of all ranks, as `unpack_ranks` gives it; all on one device."""
    if tensors[0].device.type == "xla":
        return gather_values(tensors, ranks, group, joined=joined)
    flat = to_bytes(tensors)
    rows = flat.new_empty((ranks, flat.numel()))
    if flat.is_cpu:
        dist.all_gather(list(rows), flat, group=group)
    else:
        _gather_into(rows.view(-1), flat, group=group)
    return unpack_ranks(rows, tensors, joined=joined)


def broadcast_all(tensors: list[Tensor], src: int, group: Any) -> list[Tensor]:
    """The tensors of one rank, given by its global rank; all on one device."""
    if tensors[0].device.type == "xla":
        return broadcast_values(tensors, src, group)
    flat = to_bytes(tensors).clone()
    dist.broadcast(flat, src=src, group=group)
    return from_bytes(flat, tensors)


def gather_values(tensors: list[Tensor], ranks: int, group: Any, *, joined: bool) -> list[Tensor]:
    """Each tensor of all ranks, (ranks, *its shape); joined (ranks · n, ...).

    Effects:
        One all-gather for each dtype.
    """
    out: dict[int, Tensor] = {}
    for places in _by_dtype(tensors):
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
    for places in _by_dtype(tensors):
        flat = torch.cat([tensors[place].reshape(-1) for place in places])
        dist.broadcast(flat, src=src, group=group)
        sizes = [tensors[place].numel() for place in places]
        for place, part in zip(places, flat.split(sizes), strict=True):
            out[place] = part.reshape(tensors[place].shape).clone()
    return [out[place] for place in range(len(tensors))]


def _by_dtype(tensors: list[Tensor]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(place)
    return list(groups.values())
