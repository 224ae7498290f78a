"""The exchange of packets with which every collective starts.

Every collective of fxtrain starts with an exchange of fixed-size packets: a header with a
digest of the call, then the payload if it fits. Since the size never depends on the call,
ranks that make different calls can still read each other's packets: each rank sees all
headers, so all of them raise, and the communicator stays usable. (gloo aborts the process
when sizes differ, so the check must come first.) A payload that does not fit follows in a
second collective, once the headers agree.
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
from fxtrain.ops.transport.packets import HEADER, Packets, capacity, packets_of, send, wait_packets
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

_EMPTY = torch.empty(0, dtype=torch.uint8)

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
        One exchange of packets; an all-gather of the longest payload if it does not fit; nothing
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
    arriving, sizes = _exchange_packets(ctx, call, payload)
    if max(sizes) > capacity(ctx.world_size):
        rows = _all_gather(ctx, call, payload, max(sizes))
    else:  # the buffer is reused, and the caller may keep the payloads
        rows = payload_in(arriving)[:, : max(sizes)].clone()
    if ctx.comm.simulated:  # the same traffic; every rank sends what this rank does
        return payload.repeat(ctx.world_size, 1), [payload.numel()] * ctx.world_size
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
        _exchange_packets(ctx, call, _EMPTY)
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
        raise CollectiveError(unusable_message(ctx))
    if state.pending_check is None:
        return
    packets, call, site = state.pending_check
    state.pending_check = None
    with rank_loss_guard(ctx, call, site):
        heads = _headers(wait_packets(ctx.comm, packets))
    _check_headers(ctx, call, heads, site)


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


def _exchange_packets(ctx: DistContext, call: Call, payload: Tensor) -> tuple[Tensor, list[int]]:
    """Every rank's packet and payload size."""
    packets = next_packets(ctx, call)
    _fill(ctx, packets, payload)
    arriving, heads = exchange_headers(ctx, call, digest_of(call), payload.numel(), packets)
    return arriving, [_size(head) for head in heads]


def exchange_headers(
    ctx: DistContext, call: Call, digest: bytes, size: int, packets: Packets
) -> tuple[Tensor, list[bytes]]:
    """Send the packet whose payload is in its buffer, and compare every rank's header.

    Args:
        digest: Of the call.
        size: Bytes of the payload.
        packets: As from `next_packets`; the header is written here.

    Returns:
        Every rank's packet, (ranks, bytes), valid until the next call, and their headers.

    Effects:
        One exchange of packets.

    Raises:
        CollectiveError: the calls differ or a rank never joined; on every rank.
    """
    arriving = _exchange_unchecked(ctx, call, digest, size, packets)
    heads = _headers(arriving)
    _check_headers(ctx, call, heads, None)
    return arriving, heads


def _exchange_unchecked(
    ctx: DistContext, call: Call, digest: bytes, size: int, packets: Packets
) -> Tensor:
    """As `exchange_headers`, without comparing the headers."""
    _write_header(ctx, packets, digest, size)
    with rank_loss_guard(ctx, call):
        send(ctx.comm, packets)
        return wait_packets(ctx.comm, packets)


def _check_headers(ctx: DistContext, call: Call, heads: list[bytes], site: str | None) -> None:
    if ctx.comm.checks and any([head[:16] != heads[0][:16] for head in heads]):
        text = f"{call[0]}\n{' '.join(call[1:])}\n{site or call_site()}".encode()
        limit = capacity(ctx.world_size)
        payload = torch.frombuffer(bytearray(text[:limit]), dtype=torch.uint8)
        packets = next_packets(ctx, call)
        _fill(ctx, packets, payload)
        arriving = _exchange_unchecked(ctx, call, bytes(16), payload.numel(), packets)
        texts = [
            bytes(row[: _size(head)].tolist()).decode(errors="replace")
            for row, head in zip(payload_in(arriving), _headers(arriving), strict=True)
        ]
        raise mismatch_error(ctx, texts)


def payload_in(packets: Tensor) -> Tensor:
    """The payload of a packet, or of several."""
    return packets[..., HEADER:]


def _fill(ctx: DistContext, packets: Packets, payload: Tensor) -> None:
    if 0 < payload.numel() <= capacity(ctx.world_size):
        payload_in(packets.buffer[ctx.rank])[: payload.numel()] = payload


def _write_header(ctx: DistContext, packets: Packets, digest: bytes, size: int) -> None:
    ctx.comm.state.call_count += 1
    head = digest + size.to_bytes(8, "little") + ctx.comm.state.call_count.to_bytes(8, "little")
    # Headers are read and written as raw memory: torch's views cost 60 us per call.
    ctypes.memmove(packets.buffer_rows[packets.current][ctx.rank].data_ptr(), head, HEADER)


def _headers(packets: Tensor) -> list[bytes]:
    start, step = packets.data_ptr(), packets.stride(0)
    return [ctypes.string_at(start + row * step, HEADER) for row in range(len(packets))]


def _size(head: bytes) -> int:
    return int.from_bytes(head[16:24], "little")


def _all_gather(ctx: DistContext, call: Call, payload: Tensor, size: int) -> Tensor:
    group = ctx.comm.control
    assert group is not None  # a context of several ranks has one
    rows = torch.empty((ctx.world_size, size), dtype=torch.uint8)
    mine = torch.empty(size, dtype=torch.uint8)
    mine[: payload.numel()] = payload
    with rank_loss_guard(ctx, call):
        group._allgather_base(rows.view(-1), mine).wait()
    return rows


def digest_of(call: Call) -> bytes:
    return hashlib.blake2b("\0".join(call[:2]).encode(), digest_size=16).digest()
