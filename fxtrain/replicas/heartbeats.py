"""Whether the other replicas still run, by counters in the store at which their group has met.

A replica whose process is frozen, or whose machine has lost its network, keeps its connections
open, so that the others wait in an all-reduce until its timeout. A thread of each rank raises a
counter in the store and reads those of the others. A second thread cuts the connections of the
group if one has not changed for too long while this rank waits. The all-reduce then fails as if the
other replica had been killed, on the remaining replicas too, since they are cut off in turn.
"""

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs

_TICKS = 5  # within the time after which a replica is given up


@attrs.define(eq=False)
class Heartbeats:
    """The heartbeats of this rank and of its peers in other replicas. It is mutable.

    Attributes:
        missed_s: Seconds without a sign of life after which a peer is given up.
        tell: Called with the numbers of the replicas that are given up, from a thread.
        shared: The store of the ranks of this replica, where a rank whose peer is lost tells the
            others to cut their connections too; None if it is the only one.
    """

    missed_s: float
    tell: Callable[[list[int]], None]
    shared: Any
    _stop: threading.Event = attrs.field(factory=threading.Event)
    _waits_since: float | None = None
    _heard: dict[int, float] = attrs.field(factory=dict[int, float])

    def start(
        self, store: Any, quorum: object, index: int, count: int, cut: Callable[[], None]
    ) -> None:
        """Begin for the present replicas.

        Args:
            store: That of their group, as a client of its own.
            quorum: The number of the present replicas' quorum.
            index: The number of this replica.
            count: How many there are.
            cut: Closes the connections to the others.
        """
        self._stop = stop = threading.Event()
        now = time.monotonic()
        heard = self._heard = {other: now for other in range(count) if other != index}
        threads = (
            threading.Thread(target=self._beat, args=(store, index, heard, stop), daemon=True),
            threading.Thread(
                target=self._watch, args=(heard, f"replicas/{quorum}", stop, cut), daemon=True
            ),
        )
        for thread in threads:
            thread.start()

    def stop(self) -> None:
        """End, without waiting: a store that does not answer blocks a thread."""
        self._stop.set()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which this rank waits for the others."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None

    def _beat(self, store: Any, index: int, heard: dict[int, float], stop: threading.Event) -> None:
        keys = [f"beat/{other}" for other in heard]
        seen: dict[int, bytes] = {}
        beats = 0
        with contextlib.suppress(RuntimeError):  # the replica that serves the store is gone
            while not stop.wait(self.missed_s / _TICKS):
                beats += 1
                store.set(f"beat/{index}", str(beats))
                if not store.check(keys):
                    continue
                for other, value in zip(heard, store.multi_get(keys), strict=True):
                    if seen.get(other) != value:
                        seen[other], heard[other] = value, time.monotonic()

    def _watch(
        self, heard: dict[int, float], key: str, stop: threading.Event, cut: Callable[[], None]
    ) -> None:
        tick_s = self.missed_s / _TICKS
        while not stop.wait(tick_s):
            since, now = self._waits_since, time.monotonic()
            if since is None or now - since < tick_s:
                continue
            late = [other for other, at in heard.items() if now - at > self.missed_s]
            if late:
                self.tell(late)
                if self.shared is not None:
                    self.shared.set(key, "")
            if late or (self.shared is not None and self.shared.check([key])):
                stop.set()
                cut()


def open_sockets() -> dict[int, int]:
    """The sockets of this process: file descriptors and what the kernel calls their files."""
    inodes: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                inodes[int(name)] = status.st_ino
    return inodes


def cut_sockets(sockets: Iterable[tuple[int, int]]) -> None:
    """Shut down connections that another library waits on, which sees them closed by the peer.

    gloo has no other way to end a collective that has begun: its groups ignore `abort`.

    Args:
        sockets: Entries of `open_sockets`; those that are closed by now, or listen, are left alone.
    """
    for number, inode in sockets:
        with contextlib.suppress(OSError):
            if os.fstat(number).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # a socket that listens has none
                connection.shutdown(socket.SHUT_RDWR)
