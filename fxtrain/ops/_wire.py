"""The packet in which ranks meet before anything else travels.

Every collective of fxtrain starts with one all-gather of packets of a fixed size: a header
with a digest of the call, then the payload if it fits. Since the size never depends on the
call, ranks that call different things still understand each other: each of them sees all
headers, so all of them raise, and the communicator stays usable. (gloo ends the process
when sizes differ, so the check cannot come later.) A payload that does not fit follows in a
second collective, once the headers agree.
"""

import ctypes
import hashlib
import time

import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain._errors import CollectiveError
from fxtrain.ops._views import broken, call_site, lost, mismatch
from fxtrain.state import DistContext

__all__ = [
    "Call",
    "capacity",
    "compare",
    "digest_of",
    "exchange",
    "exchange_rows",
    "guarded",
    "meet",
    "new_packets",
    "payload_in",
    "settle",
]

_HEADER = 32  # digest 16, payload length 8, number of the call 8
_LARGEST = 8192
_TOTAL = 1 << 19  # bytes that arrive at each rank in one meeting, at most

# Name of the op; its arguments, in words that equal ranks share; optionally what else to
# show of this rank's call if the ranks turn out to differ.
Call = tuple[str, str] | tuple[str, str, str]


def capacity(world_size: int) -> int:
    """Payload bytes that ride along in a packet, for so many ranks."""
    size = min(_LARGEST, max(_TOTAL // world_size, 2 * _HEADER))
    return size // _HEADER * _HEADER - _HEADER


def exchange(ctx: DistContext, call: Call, payload: Tensor) -> list[Tensor]:
    """Compare a call between all ranks and give each rank every rank's payload.

    Args:
        payload: uint8, 1-D, on the CPU; lengths may differ between ranks.

    Returns:
        One uint8 tensor per rank, by rank.

    Effects:
        One all-gather of a packet; another of the longest payload if it does not fit.

    Raises:
        CollectiveError: the calls differ or a rank did not come; on every rank.
    """
    rows, sizes = exchange_rows(ctx, call, payload)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def exchange_rows(ctx: DistContext, call: Call, payload: Tensor) -> tuple[Tensor, list[int]]:
    """As `exchange`, with the payloads as one tensor.

    Returns:
        uint8, (ranks, bytes), and by rank how many bytes of its row are payload.
    """
    settle(ctx)
    packets, sizes = _meet(ctx, call, payload)
    if max(sizes) > capacity(ctx.world_size):
        rows = _all_gather(ctx, call, _fit(payload, max(sizes)))
    else:
        rows = packets[:, _HEADER:]
    if ctx.comm.simulated:  # the same traffic, and everybody sends what this rank does
        return payload.repeat(ctx.world_size, 1), [payload.numel()] * ctx.world_size
    return rows, sizes


def compare(ctx: DistContext, call: Call, *, wait: bool = True) -> None:
    """Compare a call between all ranks before its data travels some other way.

    Args:
        wait: With False, a call that all ranks were once found to share is only compared
            by the time of the next one, so that the host need not wait for the others.

    Effects:
        One all-gather of a packet; nothing with `checks=False`.

    Raises:
        CollectiveError: the calls differ or a rank did not come; on every rank.
    """
    comm = ctx.comm
    if not comm.checks:
        return
    settle(ctx)
    digest = digest_of(call)
    if wait or digest not in comm.ledger.seen:
        _meet(ctx, call, torch.empty(0, dtype=torch.uint8))
        comm.ledger.seen.add(digest)
        return
    packet, packets = _packet(ctx, digest, torch.empty(0, dtype=torch.uint8))
    with guarded(ctx, call):
        work = _start(ctx, packets, packet)
    comm.ledger.pending = (work, packets, call, call_site())


def settle(ctx: DistContext) -> None:
    """Wait for the comparison that the last device collective left open.

    Raises:
        CollectiveError: the calls differed or a rank did not come; on every rank.
    """
    ledger = ctx.comm.ledger
    if ledger.broken is not None:
        raise CollectiveError(broken(ctx))
    if ledger.pending is None:
        return
    work, packets, call, site = ledger.pending
    ledger.pending = None
    with guarded(ctx, call, site):
        work.wait()
    _judge(ctx, call, _heads(packets), site)


class guarded:
    """Turn torch's error about a rank that is gone into one that says who waited where."""

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
        raise lost(ctx, call, site or call_site(), waited_s, error) from error


def _meet(ctx: DistContext, call: Call, payload: Tensor) -> tuple[Tensor, list[int]]:
    """Everybody's packet, and the size of everybody's payload."""
    packet, packets = new_packets(ctx)
    _fill(packet, payload)
    heads = meet(ctx, call, digest_of(call), payload.numel(), packet, packets)
    return packets, [_size(head) for head in heads]


def meet(
    ctx: DistContext, call: Call, digest: bytes, size: int, packet: Tensor, packets: Tensor
) -> list[bytes]:
    """Send a packet whose payload is in it, and compare everybody's header.

    Args:
        digest: Of the call.
        size: Bytes of the payload.
        packet: uint8, as `new_packets` makes it; its header is written here.
        packets: uint8, (ranks, bytes), filled with everybody's.

    Effects:
        One all-gather of a packet.

    Raises:
        CollectiveError: the calls differ or a rank did not come; on every rank.
    """
    _write_head(ctx, packet, digest, size)
    with guarded(ctx, call):
        _start(ctx, packets, packet).wait()
    heads = _heads(packets)
    _judge(ctx, call, heads, None)
    return heads


def _judge(ctx: DistContext, call: Call, heads: list[bytes], site: str | None) -> None:
    if ctx.comm.checks and any([head[:16] != heads[0][:16] for head in heads]):
        text = f"{call[0]}\n{' '.join(call[1:])}\n{site or call_site()}".encode()
        room = capacity(ctx.world_size)
        payload = torch.frombuffer(bytearray(text[:room]), dtype=torch.uint8)
        packet, packets = _packet(ctx, bytes(16), payload)
        with guarded(ctx, call):
            _start(ctx, packets, packet).wait()
        texts = [
            bytes(row[_HEADER : _HEADER + _size(head)].tolist()).decode(errors="replace")
            for row, head in zip(packets, _heads(packets), strict=True)
        ]
        raise mismatch(ctx, texts)


def _packet(ctx: DistContext, digest: bytes, payload: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's packet and room for everybody's."""
    packet, packets = new_packets(ctx)
    _fill(packet, payload)
    _write_head(ctx, packet, digest, payload.numel())
    return packet, packets


def new_packets(ctx: DistContext) -> tuple[Tensor, Tensor]:
    """Room for this rank's packet and for everybody's, (ranks, bytes)."""
    size = _HEADER + capacity(ctx.world_size)
    made = torch.empty((ctx.world_size, size), dtype=torch.uint8)
    return torch.empty(size, dtype=torch.uint8), made


def payload_in(packets: Tensor) -> Tensor:
    """The part of a packet, or of several, that is payload."""
    return packets[..., _HEADER:]


def _fill(packet: Tensor, payload: Tensor) -> None:
    if 0 < payload.numel() <= packet.numel() - _HEADER:
        payload_in(packet)[: payload.numel()] = payload


def _write_head(ctx: DistContext, packet: Tensor, digest: bytes, size: int) -> None:
    ctx.comm.ledger.calls += 1
    head = digest + size.to_bytes(8, "little") + ctx.comm.ledger.calls.to_bytes(8, "little")
    # A header is read and written as plain memory: torch's views of it cost 60 us a call.
    ctypes.memmove(packet.data_ptr(), head, _HEADER)


def _heads(packets: Tensor) -> list[bytes]:
    start, step = packets.data_ptr(), packets.stride(0)
    return [ctypes.string_at(start + row * step, _HEADER) for row in range(len(packets))]


def _size(head: bytes) -> int:
    return int.from_bytes(head[16:24], "little")


def _fit(payload: Tensor, size: int) -> Tensor:
    buffer = torch.empty(size, dtype=torch.uint8)
    buffer[: payload.numel()] = payload
    return buffer


def _all_gather(ctx: DistContext, call: Call, buffer: Tensor) -> Tensor:
    rows = torch.empty((ctx.world_size, buffer.numel()), dtype=torch.uint8)
    with guarded(ctx, call):
        _start(ctx, rows, buffer).wait()
    return rows


def _start(ctx: DistContext, rows: Tensor, row: Tensor) -> dist.Work:
    """Begin to gather every rank's row; the group's own call costs a quarter less than torch's."""
    group = ctx.comm.control
    assert group is not None  # a context of several ranks has one
    return group._allgather_base(rows.view(-1), row)


def digest_of(call: Call) -> bytes:
    return hashlib.blake2b("\0".join(call[:2]).encode(), digest_size=16).digest()
