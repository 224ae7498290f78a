"""A run on the machines: started, started again when it ends, and what its ranks wrote down."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import attrs

from benchmarks.chaos._adversary import NODES, RANKS, Event, happen
from tests.nodes._lab import Lab, Node

_AGAIN_S = 1.0  # until a launcher that ended is started again
_POLL_S = 0.05
_START_S = 120.0
_PAUSE_S = 1.0
_FOLDER = Path(__file__).parent
# torch's own are 5 s and 3 attempts.
_RENDEZVOUS = ("keep_alive_interval=1", "keep_alive_max_attempt=3")


def _fxtrain(node: Node, *more: str) -> tuple[str, ...]:
    return (
        *("-m", "fxtrain", "launch", "--cpu", "--rendezvous=c10d", f"--nodes={NODES}"),
        *(f"--ranks={RANKS}", "--main-address=n0", f"--node-rank={node.number}"),
        *(f"--rendezvous-option={one}" for one in _RENDEZVOUS),
        *("--restarts=1000", "--shutdown=5", *more, str(_FOLDER / "train_fxtrain.py")),
    )


def _accelerate(node: Node) -> tuple[str, ...]:
    return (
        *("-m", "torch.distributed.run", f"--nnodes={NODES}", f"--nproc-per-node={RANKS}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=n0:29500", "--rdzv-id=chaos"),
        *(f"--local-addr={node.address}", f"--rdzv-conf={','.join(_RENDEZVOUS)}"),
        *("--max-restarts=1000", str(_FOLDER / "train_accelerate.py")),
    )


def _with_spares(node: Node) -> tuple[str, ...]:
    return _fxtrain(node, "--spares=1")


PROGRAMS = {"fxtrain": _fxtrain, "with spares": _with_spares, "Accelerate": _accelerate}


@attrs.define(eq=False)
class Run:
    """A program on all machines. It is mutable: launchers end, and are started again.

    Attributes:
        disk: A file system that the machines share.
        program: A name of `PROGRAMS`.
        launchers: By node, `nsenter` and the shell that became its launcher.
        ended: By node, when its launcher ended; absent while it runs.
        ends: How often one did.
        said: When launchers and ranks wrote something, on the clock of `time.time`.
        sizes: By node, the size of what they have written.
    """

    lab: Lab
    disk: Path
    program: str
    launchers: dict[int, subprocess.Popen] = attrs.field(factory=dict)
    ended: dict[int, float] = attrs.field(factory=dict)
    ends: int = 0
    said: list[float] = attrs.field(factory=list)
    sizes: dict[int, int] = attrs.field(factory=dict)

    def start(self, node: Node) -> None:
        """Start the launcher of a node, in the node's own folder."""
        words = (sys.executable, *PROGRAMS[self.program](node), str(self.disk / "run"))
        variables = [f"{name}={value}" for name, value in self.lab.variables.items()]
        command = shlex.join(("env", *variables, *words))
        with self.output(node).open("ab") as out, open(os.devnull) as nothing:
            self.launchers[node.number] = node.shell(
                f"cd {self.lab.own} && exec {command}",
                [nothing.fileno(), out.fileno(), out.fileno()],
            )
        self.ended.pop(node.number, None)

    def output(self, node: Node) -> Path:
        """What launcher and ranks of a node write."""
        return node.disk / "output.txt"

    def follow(self, seconds: float) -> None:
        """Let the run go on, and start again the launchers that end."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for node in self.lab.nodes:
                self._follow(node)
            time.sleep(_POLL_S)

    def _follow(self, node: Node) -> None:
        number = node.number
        size = self.output(node).stat().st_size
        if size != self.sizes.get(number, 0):
            self.sizes[number] = size
            self.said.append(time.time())
        # `nsenter` stops with the program that it waits for, and is not continued with it.
        self.launchers[number].send_signal(signal.SIGCONT)
        if number in self.ended:
            if time.monotonic() > self.ended[number] + _AGAIN_S:
                self.start(node)
        elif self.launchers[number].poll() is not None:
            self.ended[number] = time.monotonic()
            self.ends += 1
            self.said.append(time.time())
            self.end(node)

    def end(self, node: Node) -> None:
        """End what is left on a node, as the end of a container does."""
        for pid in node.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def happen(self, event: Event) -> None:
        """Let an event happen."""
        node = self.lab.nodes[event.node]
        lines = [
            line
            for line in self.notes()
            if "ready" in line and line["node"] == event.node and line["rank"] % RANKS == event.rank
        ]
        rank = max(lines, key=lambda line: line["time"])["ready"] if lines else 0
        words = " ".join(PROGRAMS[self.program](node))
        launchers = [pid for pid, line in node.processes().items() if words in line]
        happen(event, node, min(launchers, default=0), rank, self.disk)

    def notes(self) -> list[dict]:
        """The lines that the ranks of all nodes have written."""
        return [
            {**json.loads(line), "node": node.number}
            for node in self.lab.nodes
            for path in sorted(node.disk.glob("notes-*.jsonl"))
            for line in path.read_text().splitlines()
            if line.endswith("}")
        ]

    def close(self) -> None:
        """End the run, and undo what has happened to the machines."""
        for node in self.lab.nodes:
            node.reset()
        for process in self.launchers.values():
            process.send_signal(signal.SIGCONT)
            process.wait(10)


@attrs.frozen(eq=False)
class Outcome:
    """What a run has made.

    Attributes:
        notes: The lines that its ranks have written.
        began: When every rank had made the first update.
        ended: When the run was ended.
        happened: The events, and when each happened.
        said: When launchers and ranks wrote something.
        ends: Launchers that ended.
        text: What they and the ranks have written.
    """

    notes: list[dict]
    began: float
    ended: float
    happened: list[tuple[Event, float]]
    said: list[float]
    ends: int
    text: str

    def made(self) -> dict[int, float]:
        """By update, when all ranks had made it for the first time."""
        times: dict[int, dict[int, float]] = defaultdict(dict)
        for line in self.notes:
            if "update" in line:
                ranks = times[line["update"]]
                ranks[line["rank"]] = min(line["time"], ranks.get(line["rank"], line["time"]))
        return {
            update: max(ranks.values())
            for update, ranks in sorted(times.items())
            if len(ranks) == NODES * RANKS
        }

    def rate(self) -> float:
        """Updates a second, from the first one to the end."""
        made = [when for when in self.made().values() if when < self.ended]
        return (len(made) - 1) / (self.ended - self.began)

    def noticed(self) -> list[float | None]:
        """Seconds from each event until something was said; None if that was not before the next.

        A network that comes back in time, or a disk, needs no words.
        """
        found: list[float | None] = []
        for begun, end in self._spans():
            first = next((t for t in self.said if begun < t < end), None)
            found.append(None if first is None else first - begun)
        return found

    def recovered(self) -> list[float]:
        """Seconds from each event to the end of the last pause that belongs to it.

        A pause is a time without an update that had not been made before, up to the end of the run
        if it does not end. It belongs to the events that happen in it or just before it, or else
        to the last one before; an event without a pause has recovered after 0 s.
        """
        times = sorted(self.made().values())
        begun = [when for _, when in self.happened]
        found = [0.0] * len(begun)
        for first, then in pairwise([*times, self.ended]):
            if then - first <= _PAUSE_S:
                continue
            causes = [n for n, when in enumerate(begun) if first - _PAUSE_S < when < then]
            before = [n for n, when in enumerate(begun) if when <= first]
            for n in causes or before[-1:]:
                found[n] = then - begun[n]
        return found

    def _spans(self) -> list[tuple[float, float]]:
        begun = [when for _, when in self.happened]
        return list(pairwise([*begun, self.ended]))

    def compare(self, reference: "Outcome") -> tuple[int, int]:
        """Rows that were lost or repeated, and updates whose parameters differ in a bit."""
        right = {(n["update"], n["rank"]): n for n in reference.notes if "update" in n}
        mine = [n for n in self.notes if "update" in n]
        last = max(n["update"] for n in mine)
        there = {(n["update"], n["rank"]) for n in mine}
        rows = sum(len(n["rows"]) for key, n in right.items() if key[0] < last and key not in there)
        bits = set()
        for note in mine:
            wanted = right[note["update"], note["rank"]]
            moved = Counter(note["rows"])
            moved.subtract(wanted["rows"])
            rows += sum(map(abs, moved.values()))
            if note["crc"] != wanted["crc"]:
                bits.add(note["update"])
        return rows, len(bits)


def run(
    lab: Lab, disk: Path, program: str, events: Sequence[Event], seconds: float, updates: int = 0
) -> Outcome:
    """Run a program for some seconds after its first update, and to an update at least."""
    shutil.rmtree(disk / "run", ignore_errors=True)
    (disk / "fast").unlink(missing_ok=True)
    now = Run(lab=lab, disk=disk, program=program)
    try:
        for node in lab.nodes:
            now.start(node)
        _until(now, 1)
        begun, began, happened = time.monotonic(), time.time(), []
        for event in events:
            now.follow(begun + event.at_s - time.monotonic())
            happened.append((event, time.time()))
            now.happen(event)
        now.follow(begun + seconds - time.monotonic())
        ended = time.time()
        if updates:
            (disk / "fast").touch()
            _until(now, updates)
        text = "".join(now.output(node).read_text(errors="replace") for node in lab.nodes)
        return Outcome(now.notes(), began, ended, happened, now.said, now.ends, text)
    finally:
        now.close()


def _until(now: Run, update: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        made = Counter(line["rank"] for line in now.notes() if line.get("update", 0) >= update)
        if len(made) == NODES * RANKS:
            return
        if time.monotonic() > deadline:
            text = "".join(now.output(node).read_text() for node in now.lab.nodes)
            raise RuntimeError(f"{now.program} did not reach update {update}:\n{text[-4000:]}")
        now.follow(0.5)
