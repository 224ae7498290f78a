"""How packets travel between the ranks of a communicator.

Few ranks write to each other: of two, the higher speaks first and the lower answers, and both
were ready for the message before it was sent. (gloo carries a collective out in a thread of its
own, and a rank whose messages come while it sends has two threads after one lock, which costs
milliseconds where cores are few. 8 KiB between ranks that compute meanwhile, two cores, mean:
2 ranks 0.3 ms against 0.9 ms of an all-gather, 4 ranks 1.4 against 4.3, 8 ranks 3.6 against
14.) Many ranks gather.
"""

import time
from datetime import timedelta

import attrs
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from fxtrain.state import Comm

__all__ = ["HEADER", "Packets", "arrived", "capacity", "packets_of", "send"]

HEADER = 32  # digest 16, payload length 8, number of the call 8
_LARGEST = 8192
_TOTAL = 1 << 19  # bytes that arrive at each rank in one meeting, at most
_FEW = 8  # ranks that write to each other
_TAG = 1  # of packets; `scatter` sends its letters with 0


@attrs.define(eq=False)
class Packets:
    """Room for the packets of a communicator, and what is under way.

    Attributes:
        rooms: Two of uint8 (ranks, bytes), used in turn: what came by one call can be read
            while that of the next arrives.
        rows: The same, by rank.
        mine: Place of this rank.
        turn: The room of the next call.
        begun: Whether packets were sent and those of the others not yet waited for.
        coming: By room and rank, receipts of packets, or why there can be none.
        unsent: Ranks that are answered once they have spoken.
        going: Of what was sent.
    """

    rooms: tuple[Tensor, Tensor]
    rows: tuple[tuple[Tensor, ...], ...]
    mine: int
    turn: int = 0
    begun: bool = False
    coming: tuple[dict[int, dist.Work | RuntimeError], ...] = attrs.field(factory=lambda: ({}, {}))
    unsent: list[int] = attrs.field(factory=list)
    going: list[dist.Work] = attrs.field(factory=list)

    @property
    def room(self) -> Tensor:
        """Everybody's packets of the next call; this rank writes its own there."""
        return self.rooms[self.turn]

    @property
    def few(self) -> bool:
        """Whether ranks write to each other."""
        return len(self.rows[0]) <= _FEW

    @property
    def lower(self) -> range:
        """The ranks that this one speaks to first."""
        return range(self.mine)

    @property
    def higher(self) -> range:
        """The ranks that speak first."""
        return range(self.mine + 1, len(self.rows[0]))


def capacity(world_size: int) -> int:
    """Payload bytes that ride along in a packet, for so many ranks."""
    size = min(_LARGEST, max(_TOTAL // world_size, 2 * HEADER))
    return size // HEADER * HEADER - HEADER


def packets_of(comm: Comm, rank: int) -> Packets:
    """The packets of a communicator, ready for the next call.

    Args:
        rank: Place of this rank in the communicator.

    Raises:
        RuntimeError: torch's, of a rank that never joined a call that was interrupted here.
    """
    packets = comm.ledger.packets
    if packets is None:
        packets = comm.ledger.packets = _opened(comm, rank)
    if packets.begun:
        arrived(comm, packets)
    return packets


def _opened(comm: Comm, rank: int) -> Packets:
    shape = (len(comm.ranks), HEADER + capacity(len(comm.ranks)))
    # Used by later calls too, so it belongs to no mode, nor to what is counted now.
    with _disable_current_modes(), torch.inference_mode(mode=False):
        one, two = (torch.empty(shape, dtype=torch.uint8) for _ in "12")
        packets = Packets(rooms=(one, two), rows=(one.unbind(), two.unbind()), mine=rank)
        _expect(comm, packets, packets.lower, 0)
        _expect(comm, packets, packets.higher, 0)
    return packets


def send(comm: Comm, packets: Packets, *, at_once: bool = False) -> None:
    """Begin to exchange the packets in the room.

    Args:
        at_once: Speak to all, though it may cost more: the others will wait for it before
            this rank does.

    Effects:
        A message to each other rank, or an all-gather among more than eight.

    Raises:
        RuntimeError: torch's, of a rank that is gone.
    """
    rows = packets.rows[packets.turn]
    packets.begun = True
    # The calls are those of the group, which cost a quarter less than torch's around them.
    if not packets.few:
        assert comm.control is not None  # a communicator of several ranks has one
        work = comm.control._allgather_base(packets.room.view(-1), rows[packets.mine])
        packets.going.append(work)
        return
    packets.unsent = [*packets.lower, *packets.higher]
    while packets.unsent and (at_once or packets.unsent[0] < packets.mine):
        _speak(comm, packets)


def arrived(comm: Comm, packets: Packets) -> Tensor:
    """Wait for everybody's packets, (ranks, bytes); they stay until the next call.

    Effects:
        Answers who has spoken, and makes ready for the next packets.

    Raises:
        RuntimeError: torch's, of a rank that is gone or never joined in time.
    """
    turn = packets.turn
    until = time.monotonic() + comm.timeout_s
    for ranks in (packets.higher, packets.lower):
        _listen(packets, ranks, until)
        _expect(comm, packets, ranks, 1 - turn)
        while packets.unsent:
            _speak(comm, packets)
    while packets.going:
        packets.going.pop().wait(_left(until))
    if comm.simulated:  # everybody sends what this rank does
        with _disable_current_modes():
            packets.room[:] = packets.room[packets.mine].clone()
    packets.turn = 1 - turn
    packets.begun = False
    return packets.rooms[turn]


def _speak(comm: Comm, packets: Packets) -> None:
    assert comm.control is not None  # a communicator of several ranks has one
    mine = packets.rows[packets.turn][packets.mine]
    packets.going.append(comm.control.send([mine], packets.unsent.pop(0), _TAG))


def _listen(packets: Packets, ranks: range, until: float) -> None:
    """Wait for packets of this call from these ranks."""
    coming = packets.coming[packets.turn]
    for rank in ranks:
        # Taken first, since an interrupt comes when the wait is over; then it is gone.
        work = coming.pop(rank, None)
        if isinstance(work, RuntimeError):
            raise work
        if work is not None:
            work.wait(_left(until))


def _left(until: float) -> timedelta:
    return timedelta(seconds=max(until - time.monotonic(), 0.001))


def _expect(comm: Comm, packets: Packets, ranks: range, turn: int) -> None:
    """Be ready for packets of these ranks in one of the rooms, if they write to each other."""
    if not packets.few or comm.control is None:
        return
    coming = packets.coming[turn]
    for rank in ranks:
        if rank in coming:
            continue
        try:
            coming[rank] = comm.control.recv([packets.rows[turn][rank]], rank, _TAG)
        except RuntimeError as error:  # it has left, which matters if it was to say more
            coming[rank] = error
