"""What happens to the machines of a run, and when: drawn from a seed."""

import contextlib
import errno
import os
import random
import signal
from pathlib import Path

import attrs

from tests.nodes._lab import Node, later

NODES, RANKS = 2, 2  # machines, and ranks of each
KINDS = (
    "rank killed",
    "launcher killed",
    "rank frozen",
    "node frozen for 3 s",
    "node frozen for 12 s",
    "network cut for 2 s",
    "network cut for 12 s",
    "node restarted",
    "disk full for 5 s",
    "newest checkpoint damaged",
)


@attrs.frozen
class Event:
    """What happens.

    Attributes:
        at_s: Seconds after the first update of the run.
        kind: One of `KINDS`.
        node: The machine.
        rank: One of its ranks, from 0.
        place: Where a file is damaged, as a part of its size.
    """

    at_s: float
    kind: str
    node: int
    rank: int
    place: float


def draw_events(seed: int, seconds: float, every_s: float) -> list[Event]:
    """The events of a run: each kind happens once before any happens again."""
    draw = random.Random(seed)
    events: list[Event] = []
    kinds: list[str] = []
    at_s = every_s / 2
    while at_s < seconds - every_s / 2:
        kinds = kinds or draw.sample(KINDS, len(KINDS))
        place = (draw.randrange(NODES), draw.randrange(RANKS), draw.random())
        events.append(Event(at_s, kinds.pop(), *place))
        at_s += every_s * draw.uniform(0.7, 1.3)
    return events


def happen(event: Event, node: Node, launcher: int, rank: int, disk: Path) -> None:
    """Let an event happen.

    Args:
        launcher: The launcher's process on the host; 0 if none runs.
        rank: The process of the event's rank, by its number on the node; 0 if none runs.
        disk: A file system that the machines share, with the run in its folder "run".
    """
    kind, _, lasts = event.kind.partition(" for ")
    undo = None
    # What has ended by now cannot be killed.
    with contextlib.suppress(KeyError, ProcessLookupError):
        if kind == "rank killed":
            node.send_signal(rank, signal.SIGKILL)
        elif kind == "launcher killed" and launcher:
            os.kill(launcher, signal.SIGKILL)
        elif kind == "rank frozen":
            node.send_signal(rank, signal.SIGSTOP)
        elif kind == "node frozen":
            node.freeze()
            undo = node.thaw
        elif kind == "network cut":
            node.cut()
            undo = lambda: node.link("up")  # noqa: E731
        elif kind == "node restarted":
            node.kill_all()
        elif kind == "disk full":
            fill(disk / "ballast")
            undo = (disk / "ballast").unlink
        elif kind == "newest checkpoint damaged":
            damage(disk / "run", event.place)
            node.send_signal(rank, signal.SIGKILL)
    if undo is not None:
        later(float(lasts.split()[0]), undo)


def fill(path: Path) -> None:
    """Write a file until the disk is full."""
    with path.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                size //= 2


def damage(run: Path, place: float) -> None:
    """Change a byte of the largest file of the newest checkpoint, if there is one."""
    found = sorted(run.glob("update-*"), key=lambda path: int(path.name[7:].split(".")[0]))
    files = sorted(found[-1].glob("*.safetensors"), key=lambda path: path.stat().st_size)
    if not files:
        return
    with files[-1].open("r+b") as file:
        # Behind the header, whose damage any reader notices.
        size = files[-1].stat().st_size
        file.seek(int(size * (0.1 + 0.9 * place)))
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))
