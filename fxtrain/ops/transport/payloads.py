"""Payloads that did not fit in packets: how they are sent, and where they arrive.

Few ranks send them in an all-gather, many in rounds of messages, each beginning with its length.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain.ops.transport.messages import Messages, unrecorded
from fxtrain.ops.transport.rounds import (
    MessageRound,
    collect_rounds,
    gather_rounds,
    reduce_rounds,
    spread_rounds,
)
from fxtrain.state import DistContext

_SIZE_BYTES = 8  # of the length before a payload of many ranks

# Of payloads of two groups of ranks, that of the lower ones first, as one of the same length.
Combine = Callable[[Tensor, Tensor], Tensor]


def send_payloads(
    ctx: DistContext,
    payload: Tensor,
    largest: int,
    *,
    few: bool,
    src: int | None,
    root: int | None,
    combine: Combine | None,
) -> tuple[dist.Work | Messages, Tensor]:
    """Send payloads that did not fit in packets.

    Args:
        payload: That of this rank.
        largest: Bytes of the longest one.
        few: Whether every rank knows how long each is.
        src: The only rank that has one; None if each may.
        root: The only rank that gets them; None if all do.
        combine: How they are combined into one; None if they are not.

    Returns:
        What sends them, and the rows in which they arrive: those of all ranks, (ranks, largest),
        among few, and what `ordered` or `combined` reads among many.
    """
    ranks = ctx.world_size
    if few:
        rows = payload.new_empty((ranks, largest))
        if gap := largest - payload.numel():
            payload = torch.cat([payload, payload.new_empty(gap)])
        return _all_gather(ctx, rows, payload), rows
    if combine is not None:
        rounds = reduce_rounds(ctx.rank, ranks)
        rows = payload.new_empty((2 * len(rounds) + 1, largest))
        rows[0] = payload
        arrived = partial(_combine_rows, rows, rounds, combine, ctx.rank)
        return Messages(group=ctx.comm.control, rounds=rounds, rows=rows, arrived=arrived), rows
    if src is not None:
        rounds = spread_rounds(ctx.rank, ranks, src)
        rows = payload.new_empty((1, largest))
        rows[0, : payload.numel()] = payload
    else:
        rounds = gather_rounds(ctx.rank, ranks)
        if root is not None:
            rounds = collect_rounds(ctx.rank, ranks, root)
        count = max(1, *(each.received[1] for each in rounds))
        rows = payload.new_empty((count, _SIZE_BYTES + largest))
        size = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
        rows[0, : _SIZE_BYTES + payload.numel()] = torch.cat([size.view(torch.uint8), payload])
    return Messages(group=ctx.comm.control, rounds=rounds, rows=rows), rows


def _combine_rows(
    rows: Tensor, rounds: Sequence[MessageRound], combine: Combine, rank: int, number: int
) -> None:
    """Combine what has arrived in a round of `reduce_rounds`."""
    own, source, arrived = rows[number], rounds[number].source, rounds[number].received[0]
    if source is None:
        rows[number + 1] = own
    elif arrived > len(rounds):  # else it is the result
        other = rows[arrived]
        rows[number + 1] = combine(own, other) if rank < source else combine(other, own)


def ordered(
    ctx: DistContext, rows: Tensor, largest: int, src: int | None
) -> tuple[Tensor, list[int]]:
    """The payloads of many ranks, by rank, and their lengths."""
    ranks = ctx.world_size
    if src is not None:
        return rows.expand(ranks, largest), [largest if r == src else 0 for r in range(ranks)]
    if len(rows) < ranks:  # of another rank than the root
        return rows.new_empty((ranks, 0)), [0] * ranks
    rows = from_rank_0(ctx, rows)
    sizes = rows[:, :_SIZE_BYTES].contiguous().view(torch.int64).view(-1).tolist()
    return rows[:, _SIZE_BYTES:], sizes


def from_rank_0(ctx: DistContext, rows: Tensor) -> Tensor:
    """Rows from that of this rank on, as `gather_rounds` orders them, from that of rank 0 on."""
    first = -ctx.rank % ctx.world_size
    return torch.cat([rows[first:], rows[:first]])


def combined(rows: Tensor) -> Tensor:
    """The payload that combines those of all ranks."""
    return rows[len(rows) // 2]  # after as many rounds, before what arrived in them


def repeated(payload: Tensor, ranks: int, combine: Combine) -> Tensor:
    """As many equal payloads combined."""
    if ranks == 1:
        return payload
    half = repeated(payload, ranks // 2, combine)
    both = combine(half, half)
    return combine(both, payload) if ranks % 2 else both


def _all_gather(ctx: DistContext, rows: Tensor, local: Tensor) -> dist.Work:
    """Start an all-gather of bytes."""
    assert ctx.comm.control is not None  # a context of several ranks has one
    # Methods of the group cost a quarter less than the functions of torch.distributed.
    return unrecorded(ctx.comm.control._allgather_base, rows.view(-1), local)
