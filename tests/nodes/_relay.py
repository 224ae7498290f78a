"""A network that delays and loses packets, which this kernel has no queueing discipline for.

`python _relay.py DELAY_S LOSS FROM TO [FROM TO ...]` passes Ethernet frames between interfaces: in
the direction of FROM to TO with a delay and a loss, back at once. It knows nothing of the content:
what TCP does about a frame that is missing is that of the kernels at both ends.
"""

import contextlib
import heapq
import random
import select
import socket
import sys
import time

_PACKET, _VNET_HEADER, _IGNORE_OUTGOING = 263, 15, 23  # see packet(7)
_EVERY_PROTOCOL = 3
_LARGEST_FRAME = 1 << 17


def main() -> None:
    """Relay until killed; writes a line once it does."""
    delay_s, loss = map(float, sys.argv[1:3])
    doors = [_open(name) for name in sys.argv[3:]]
    way = {doors[n]: (doors[n ^ 1], n % 2 == 0) for n in range(len(doors))}
    waiting: list[tuple[float, int, bytes, socket.socket]] = []
    count = 0
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for door in select.select(doors, [], [], wait_s)[0]:
            other, slow = way[door]
            for frame in _frames(door):
                if not slow:
                    _send(other, frame)
                elif random.random() >= loss:
                    count += 1  # frames of the same time stay in order
                    heapq.heappush(waiting, (time.monotonic() + delay_s, count, frame, other))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, frame, other = heapq.heappop(waiting)
            _send(other, frame)


def _open(name: str) -> socket.socket:
    door = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    # Checksums and segments that the kernel has not finished are finished at the other side.
    door.setsockopt(_PACKET, _VNET_HEADER, 1)
    door.setsockopt(_PACKET, _IGNORE_OUTGOING, 1)
    door.bind((name, 0))
    door.setblocking(False)
    return door


def _frames(door: socket.socket):
    with contextlib.suppress(BlockingIOError):
        while True:
            yield door.recv(_LARGEST_FRAME)


def _send(door: socket.socket, frame: bytes) -> None:
    # A full queue or a cable that is not plugged in loses frames, too.
    with contextlib.suppress(OSError):
        door.send(frame)


if __name__ == "__main__":
    main()
