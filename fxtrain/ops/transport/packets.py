"""How packets are sent between the ranks of a communicator.

Up to eight ranks send point to point: of two ranks, the higher sends first and the lower
replies, and both post their receives before anything is sent. (gloo runs a collective in a
separate thread, and a rank that receives while it sends has two threads contending for one
lock, which costs milliseconds on few cores. 8 KiB between ranks that compute meanwhile, two
cores, mean: 2 ranks 0.3 ms against 0.9 ms for an all-gather, 4 ranks 1.4 against 4.3, 8 ranks
3.6 against 14.) More ranks use an all-gather.

A payload that does not fit in a packet follows it at once as its body, where packets are sent
point to point: whoever reads the header knows how long the body is, and posts its receive then.
"""

import ctypes
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from fxtrain.state import Comm

__all__ = [
    "HEADER",
    "Arrived",
    "Packets",
    "capacity",
    "packets_of",
    "send",
    "sends_bodies",
    "wait_packets",
]

HEADER = 32  # digest 16, payload length 8, call number 8
_MAX_PACKET_BYTES = 8192
_MAX_TOTAL_BYTES = 1 << 19  # bytes that arrive at each rank in one exchange, at most
_MAX_DIRECT_RANKS = 8  # ranks that send point to point
_TAG = 1  # of packets; `scatter` sends its trees with 0
_FIRST_BODY_TAG = 2  # of bodies: one for each call, so that none is taken for a later one
_TORCH: Any = torch._C  # parts of it have no type stubs


class Arrived(NamedTuple):
    """What an exchange of packets brought.

    Attributes:
        packets: Every rank's packet, (ranks, bytes), valid until the next call.
        headers: By rank.
        sizes: By rank, the bytes of its payload.
        bodies: As in `Packets`.
    """

    packets: Tensor
    headers: list[bytes]
    sizes: list[int]
    bodies: Tensor | None


@attrs.define(eq=False)
class Packets:
    """The packet buffers of a communicator, and what is in flight.

    Attributes:
        buffers: Two of uint8 (ranks, bytes), used alternately: packets of one call can be read
            while those of the next arrive.
        buffer_rows: The same, by rank.
        rank: This rank in the communicator.
        current: Index of the buffer of the next call.
        in_flight: Whether packets were sent and those of the other ranks not yet awaited.
        receives: By buffer and rank, posted receives, or the error of posting one.
        deferred_sends: Ranks that get a reply once their packet has arrived.
        sends: Sends in flight.
        body: What follows this rank's packet, if anything.
        body_tag: Of the bodies of this call.
        bodies: What followed the packets of this call, uint8, (ranks, the longest payload); None
            where every payload is in its packet.
        body_receives: By rank, its posted receives.
    """

    buffers: tuple[Tensor, Tensor]
    buffer_rows: tuple[tuple[Tensor, ...], ...]
    rank: int
    current: int = 0
    in_flight: bool = False
    receives: tuple[dict[int, dist.Work | RuntimeError], ...] = attrs.field(
        factory=lambda: ({}, {})
    )
    deferred_sends: list[int] = attrs.field(factory=list)
    sends: list[dist.Work] = attrs.field(factory=list)
    body: Tensor | None = None
    body_tag: int = _FIRST_BODY_TAG
    bodies: Tensor | None = None
    body_receives: dict[int, dist.Work] = attrs.field(factory=dict)

    @property
    def buffer(self) -> Tensor:
        """Every rank's packet of the next call; this rank writes its own there."""
        return self.buffers[self.current]

    @property
    def is_direct(self) -> bool:
        """Whether ranks send point to point."""
        return sends_bodies(len(self.buffer_rows[0]))

    @property
    def lower(self) -> range:
        """The ranks to which this one sends first."""
        return range(self.rank)

    @property
    def higher(self) -> range:
        """The ranks that send first."""
        return range(self.rank + 1, len(self.buffer_rows[0]))


def capacity(world_size: int) -> int:
    """Payload bytes that fit in a packet, at this world size."""
    size = min(_MAX_PACKET_BYTES, max(_MAX_TOTAL_BYTES // world_size, 2 * HEADER))
    return size // HEADER * HEADER - HEADER


def sends_bodies(world_size: int) -> bool:
    """Whether ranks send point to point, so that a payload can follow its packet at once."""
    return world_size <= _MAX_DIRECT_RANKS


def packets_of(comm: Comm, rank: int) -> Packets:
    """The packets of a communicator, ready for the next call.

    Args:
        rank: This rank in the communicator.

    Raises:
        RuntimeError: torch's, if a rank never joined a call that was interrupted here.
    """
    packets = comm.state.packets
    if packets is None:
        packets = comm.state.packets = _new_packets(comm, rank)
    if packets.in_flight:
        wait_packets(comm, packets)
    return packets


def _new_packets(comm: Comm, rank: int) -> Packets:
    shape = (len(comm.ranks), HEADER + capacity(len(comm.ranks)))
    # Later calls use them too, so they are made outside any dispatch mode or traffic count.
    with _disable_current_modes(), torch.inference_mode(mode=False):
        one, two = (torch.zeros(shape, dtype=torch.uint8, device="cpu") for _ in "12")
        packets = Packets(buffers=(one, two), buffer_rows=(one.unbind(), two.unbind()), rank=rank)
        _post_receives(comm, packets, packets.lower, 0)
        _post_receives(comm, packets, packets.higher, 0)
    return packets


def send(
    comm: Comm, packets: Packets, body: Tensor | None = None, *, at_once: bool = False
) -> None:
    """Start to exchange the packets in the current buffer.

    Args:
        body: What follows this rank's packet, uint8, 1-D, as long as its header says; only
            where packets are sent point to point.
        at_once: Send to every rank immediately, which may cost more: the other ranks wait for
            the packet before this rank waits for theirs.

    Effects:
        A message to each other rank, and another with the body, or an all-gather among more
        than eight.

    Raises:
        RuntimeError: torch's, if a rank is gone.
    """
    rows = packets.buffer_rows[packets.current]
    packets.in_flight, packets.body, packets.bodies = True, body, None
    packets.body_tag = _FIRST_BODY_TAG + comm.state.call_count
    packets.body_receives.clear()
    # Methods of the group cost a quarter less than the functions of torch.distributed.
    if not packets.is_direct:
        assert comm.control is not None  # a communicator of several ranks has one
        mine = packets.buffer.view(-1), rows[packets.rank]
        packets.sends.append(_unrecorded(comm.control._allgather_base, *mine))
        return
    packets.deferred_sends = [*packets.lower, *packets.higher]
    while packets.deferred_sends and (at_once or packets.deferred_sends[0] < packets.rank):
        _post_sends(comm, packets)


def wait_packets(comm: Comm, packets: Packets) -> Arrived:
    """Wait for every rank's packet and what follows it.

    Effects:
        Replies to the ranks that sent first, and posts the receives of the next call.

    Raises:
        RuntimeError: torch's, if a rank is gone or never joined in time.
    """
    index = packets.current
    until = time.monotonic() + comm.timeout_s
    # Its messages are not recorded, so this is what a trace shows of an exchange.
    with _TORCH._profiler._RecordFunctionFast("fxtrain::exchange"):
        for ranks in (packets.higher, packets.lower):
            _wait_receives(packets, ranks, until)
            _post_receives(comm, packets, ranks, 1 - index)
            while packets.deferred_sends:
                _post_sends(comm, packets)
        if comm.simulated:  # every rank sends what this rank does
            with _disable_current_modes():
                packets.buffer[:] = packets.buffer[packets.rank].clone()
        if not packets.is_direct:
            _wait_sends(packets, until)  # the all-gather, which fills the buffer
        headers = _headers(packets.buffer)
        sizes = [int.from_bytes(header[16:24], "little") for header in headers]
        if packets.is_direct and max(sizes) > capacity(len(sizes)):
            _receive_bodies(comm, packets, sizes, until)
        _wait_sends(packets, until)
    packets.current = 1 - index
    packets.in_flight = False
    return Arrived(packets.buffers[index], headers, sizes, packets.bodies)


def _headers(packets: Tensor) -> list[bytes]:
    # Headers are read and written as raw memory: torch's views cost 60 us per call.
    start, step = packets.data_ptr(), packets.stride(0)
    return [ctypes.string_at(start + row * step, HEADER) for row in range(len(packets))]


def _post_sends(comm: Comm, packets: Packets) -> None:
    assert comm.control is not None  # a communicator of several ranks has one
    mine = packets.buffer_rows[packets.current][packets.rank]
    rank = packets.deferred_sends.pop(0)
    packets.sends.append(_unrecorded(comm.control.send, [mine], rank, _TAG))
    if packets.body is not None:
        sent = _unrecorded(comm.control.send, [packets.body], rank, packets.body_tag)
        packets.sends.append(sent)


def _receive_bodies(comm: Comm, packets: Packets, sizes: list[int], until: float) -> None:
    """Receive what follows the packets of this call; an interrupted wait is taken up again.

    Args:
        sizes: By rank, the bytes of its payload.
    """
    assert comm.control is not None  # a communicator of several ranks has one
    limit = capacity(len(sizes))
    if packets.bodies is None:
        packets.bodies = torch.empty((len(sizes), max(sizes)), dtype=torch.uint8, device="cpu")
        if packets.body is not None:
            packets.bodies[packets.rank, : len(packets.body)] = packets.body
    for rank, size in enumerate(sizes):
        if size > limit and rank not in (packets.rank, *packets.body_receives):
            row = packets.bodies[rank, :size]
            work = _unrecorded(comm.control.recv, [row], rank, packets.body_tag)
            packets.body_receives[rank] = work
    for work in packets.body_receives.values():
        work.wait(_remaining(until))


def _wait_sends(packets: Packets, until: float) -> None:
    while packets.sends:
        packets.sends.pop().wait(_remaining(until))


def _wait_receives(packets: Packets, ranks: range, until: float) -> None:
    """Wait for packets of this call from these ranks."""
    receives = packets.receives[packets.current]
    for rank in ranks:
        # Popped first: an interrupt is raised after the wait, when the receive has completed.
        work = receives.pop(rank, None)
        if isinstance(work, RuntimeError):
            raise work
        if work is not None:
            work.wait(_remaining(until))


def _remaining(until: float) -> timedelta:
    return timedelta(seconds=max(until - time.monotonic(), 0.001))


def _post_receives(comm: Comm, packets: Packets, ranks: range, index: int) -> None:
    """Post receives for packets of these ranks in one of the buffers, if sent point to point."""
    if not packets.is_direct or comm.control is None:
        return
    receives = packets.receives[index]
    for rank in ranks:
        if rank in receives:
            continue
        row = [packets.buffer_rows[index][rank]]
        try:
            receives[rank] = _unrecorded(comm.control.recv, row, rank, _TAG)
        except RuntimeError as error:  # the rank left; it matters only if a call waits for it
            receives[rank] = error


def _unrecorded(post: Callable[..., dist.Work], *arguments: Any) -> dist.Work:
    """Post a message that torch's profiler does not record.

    Messages are in flight between calls, and so when a profiler stops. An event of gloo that ends
    after that is written into freed memory (torch 2.13): docs/profiling.md.
    """
    if not _TORCH._autograd._profiler_enabled():
        return post(*arguments)
    record = _TORCH._autograd._enable_record_function
    record(False)  # noqa: FBT003 - torch takes no keyword
    try:
        return post(*arguments)
    finally:
        record(True)  # noqa: FBT003
