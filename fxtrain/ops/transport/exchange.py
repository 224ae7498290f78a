"""The exchange of packets with which every collective starts.

Every collective of fxtrain starts with an exchange of fixed-size packets: a header with a
digest of the call, then the payload if it fits. Since the size never depends on the call,
ranks that make different calls can still read each other's packets: each rank sees all
headers, so all of them raise, and the communicator stays usable. (gloo aborts the process
when sizes differ, so the check must come first.) A payload that does not fit follows its packet
as a message of its own, whose length the header says; among more than eight ranks it follows in
an all-gather, once the headers agree.
"""

import ctypes
import hashlib
import time

import torch
from torch import Tensor

from fxtrain._errors import CollectiveError
from fxtrain.ops.transport.mismatches import (
    call_site,
    lost_rank_error,
    mismatch_error,
    unusable_message,
)
from fxtrain.ops.transport.packets import (
    HEADER,
    Arrived,
    Packets,
    capacity,
    packets_of,
    send,
    wait_packets,
)
from fxtrain.ops.transport.thread_owner import check_thread
from fxtrain.state import DistContext

__all__ = [
    "Call",
    "compare",
    "digest_of",
    "exchange_headers",
    "exchange_payloads",
    "exchange_rows",
    "next_packets",
    "payload_in",
    "rank_loss_guard",
    "wait_pending_check",
]

_UNCHECKED = bytes(16)  # digest of packets that say what each rank called

# Name of the op; its arguments as text, equal on ranks whose calls match; optionally a third
# text that is only shown if the ranks differ.
Call = tuple[str, str] | tuple[str, str, str]


def exchange_payloads(ctx: DistContext, call: Call, payload: Tensor) -> list[Tensor]:
    """Compare a call between all ranks and gather every rank's payload.

    Args:
        payload: uint8, 1-D, on the CPU; lengths may differ between ranks.

    Returns:
        One uint8 tensor per rank, by rank.

    Effects:
        One exchange of packets. If a rank's payload does not fit, a message from that rank to each
        other rank or, among more than eight ranks, an all-gather of the longest payload. Nothing
        at one rank.

    Raises:
        CollectiveError: the calls differ or a rank never joined; on every rank.
    """
    if ctx.world_size == 1:
        return [payload.clone()]
    rows, sizes = exchange_rows(ctx, call, payload)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def exchange_rows(ctx: DistContext, call: Call, payload: Tensor) -> tuple[Tensor, list[int]]:
    """As `exchange_payloads`, with the payloads as one tensor.

    Returns:
        uint8, (ranks, bytes), and by rank the number of payload bytes in its row.
    """
    packets = next_packets(ctx, call)
    limit = capacity(ctx.world_size)
    if 0 < payload.numel() <= limit:
        payload_in(packets.buffer[ctx.rank])[: payload.numel()] = payload
    body = payload if packets.is_direct and payload.numel() > limit else None
    size = payload.numel()
    packed, _, sizes, rows = exchange_headers(ctx, call, digest_of(call), size, packets, body)
    if rows is not None:
        for rank, length in enumerate(sizes):
            if length <= limit:
                rows[rank, :length] = payload_in(packed[rank])[:length]
    elif max(sizes) <= limit:  # the buffer is reused, and the caller may keep the payloads
        rows = payload_in(packed)[:, : max(sizes)].clone()
    else:
        rows = _all_gather(ctx, call, payload, max(sizes))
    if ctx.comm.simulated:  # the same traffic; every rank sends what this rank does
        rows = payload.repeat(ctx.world_size, 1)
    return rows, sizes


def compare(ctx: DistContext, call: Call, *, wait: bool = True) -> None:
    """Compare a call between all ranks before its data is sent by another collective.

    Args:
        wait: If False, a call that was verified before is compared no later than at the next
            call, so that the host does not wait for the other ranks.

    Effects:
        One exchange of packets; nothing with `checks=False`.

    Raises:
        CollectiveError: the calls differ or a rank never joined; on every rank.
    """
    comm = ctx.comm
    if not comm.checks:
        check_thread(ctx)
        return
    digest = digest_of(call)
    if wait or digest not in comm.state.verified_calls:
        exchange_headers(ctx, call, digest, 0, next_packets(ctx, call))
        comm.state.verified_calls.add(digest)
        return
    packets = next_packets(ctx, call)
    _write_header(ctx, packets, digest, 0)
    with rank_loss_guard(ctx, call):
        send(comm, packets, at_once=True)
    comm.state.pending_check = (packets, call, call_site())


def wait_pending_check(ctx: DistContext) -> None:
    """Wait for the comparison that the last device collective deferred.

    Raises:
        CollectiveError: the calls differed or a rank never joined; on every rank. Or as
            `check_thread`.
    """
    state = ctx.comm.state
    check_thread(ctx)
    if state.failure is not None:
        raise CollectiveError(unusable_message(ctx), code="FX302")
    if state.pending_check is None:
        return
    packets, call, site = state.pending_check
    state.pending_check = None
    with rank_loss_guard(ctx, call, site):
        arrived = wait_packets(ctx.comm, packets)
    _check_headers(ctx, call, arrived.headers, site)


def next_packets(ctx: DistContext, call: Call) -> Packets:
    """Buffers for the packets of a call, once all earlier calls have completed.

    Raises:
        CollectiveError: as `wait_pending_check`; or an earlier call was interrupted, and a rank
            never joined it.
    """
    wait_pending_check(ctx)
    with rank_loss_guard(ctx, call):
        return packets_of(ctx.comm, ctx.rank)


class rank_loss_guard:
    """Turn torch's error about a lost rank into one that names who waited where."""

    def __init__(self, ctx: DistContext, call: Call, site: str | None = None) -> None:
        self._for = (ctx, call, site)
        self._started = time.monotonic()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
            return
        ctx, call, site = self._for
        waited_s = time.monotonic() - self._started
        raise lost_rank_error(ctx, call, site or call_site(), waited_s, error) from error


def exchange_headers(
    ctx: DistContext,
    call: Call,
    digest: bytes,
    size: int,
    packets: Packets,
    body: Tensor | None = None,
) -> Arrived:
    """Send the packet whose payload is in its buffer, and compare every rank's header.

    Args:
        digest: Of the call.
        size: Bytes of the payload.
        packets: As from `next_packets`; the header is written here.
        body: The payload, where it follows the packet.

    Effects:
        One exchange of packets, and of bodies.

    Raises:
        CollectiveError: the calls differ or a rank never joined; on every rank.
    """
    _write_header(ctx, packets, digest, size)
    with rank_loss_guard(ctx, call):
        send(ctx.comm, packets, body)
        arrived = wait_packets(ctx.comm, packets)
    if digest != _UNCHECKED:
        _check_headers(ctx, call, arrived.headers, None)
    return arrived


def _check_headers(ctx: DistContext, call: Call, heads: list[bytes], site: str | None) -> None:
    if ctx.comm.checks and any([head[:16] != heads[0][:16] for head in heads]):
        text = f"{call[0]}\n{' '.join(call[1:])}\n{site or call_site()}".encode()
        text = text[: capacity(ctx.world_size)]
        packets = next_packets(ctx, call)
        payload = payload_in(packets.buffer[ctx.rank])
        payload[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        arrived = exchange_headers(ctx, call, _UNCHECKED, len(text), packets)
        texts = [
            bytes(row[:size].tolist()).decode(errors="replace")
            for row, size in zip(payload_in(arrived.packets), arrived.sizes, strict=True)
        ]
        raise mismatch_error(ctx, texts)


def payload_in(packets: Tensor) -> Tensor:
    """The payload of a packet, or of several."""
    return packets[..., HEADER:]


def _write_header(ctx: DistContext, packets: Packets, digest: bytes, size: int) -> None:
    ctx.comm.state.call_count += 1
    head = digest + size.to_bytes(8, "little") + ctx.comm.state.call_count.to_bytes(8, "little")
    # As raw memory: torch's views cost 60 us per call.
    ctypes.memmove(packets.buffer_rows[packets.current][ctx.rank].data_ptr(), head, HEADER)


def _all_gather(ctx: DistContext, call: Call, payload: Tensor, size: int) -> Tensor:
    group = ctx.comm.control
    assert group is not None  # a context of several ranks has one
    rows = torch.empty((ctx.world_size, size), dtype=torch.uint8, device="cpu")
    mine = torch.empty(size, dtype=torch.uint8, device="cpu")
    mine[: payload.numel()] = payload
    with rank_loss_guard(ctx, call):
        group._allgather_base(rows.view(-1), mine).wait()
    return rows


def digest_of(call: Call) -> bytes:
    return hashlib.blake2b("\0".join(call[:2]).encode(), digest_size=16).digest()
