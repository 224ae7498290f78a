"""How soon launchers say what happened to another machine, and how soon they end. Needs root.

python -m benchmarks.machines [event ...]
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._common import show, tell
from tests.nodes import _lab

TIMEOUT_S = 6.0
LIMIT_S = 60.0  # a launcher that has not ended by then waits for something
ELASTIC = ("--rendezvous=c10d", "--restarts=3")

# What happens, as a function of both nodes and both launchers; and the node that is gone after it.
Event = Callable[[_lab.Lab, list[_lab.Program]], object]
EVENTS: dict[str, tuple[Event, int | None]] = {
    "rank 1 is killed": (lambda lab, runs: lab.nodes[1].send_signal(runs[1].rank(1), 9), None),
    "launcher 1 is killed": (lambda _, runs: runs[1].send_signal(9), 1),
    "launcher 1 gets SIGTERM": (lambda _, runs: runs[1].send_signal(15), None),
    "cable 1": (lambda lab, _: lab.nodes[1].cut(), None),
    "cable 0": (lambda lab, _: lab.nodes[0].cut(), None),
    "split": (lambda lab, _: lab.split(1), None),
    "power 1": (lambda lab, _: lab.nodes[1].power_off(), 1),
    "power 0": (lambda lab, _: lab.nodes[0].power_off(), 0),
    "freeze 1": (lambda lab, _: lab.nodes[1].freeze(), 1),
    "c10d, processes 0": (lambda lab, _: lab.nodes[0].kill_all(), 0),
    "c10d, power 0": (lambda lab, _: lab.nodes[0].power_off(), 0),
    "c10d, cable 0": (lambda lab, _: lab.nodes[0].cut(), None),
}


def main(*names: str) -> None:
    if problem := _lab.problem():
        tell(problem)
        return
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="fxtrain-machines-") as folder,
        _lab.opened(Path(folder) / "lab", 2, "10.91.8") as lab,
    ):
        for name in names or EVENTS:
            tell(name)
            rows.append([name, *measure(lab, name)])
    columns = ["", "n0 says", "n0 ends", "code", "n1 says", "n1 ends", "code"]
    show(f"Seconds after the event, timeout_s={TIMEOUT_S:g}", columns, rows)


def measure(lab: _lab.Lab, name: str) -> list[str]:
    """For each node: seconds to the first line about the event, to the end, and the exit code."""
    lab.reset()
    event, gone = EVENTS[name]
    options = ("--nodes=2", "--main-address=n0", *(ELASTIC if name.startswith("c10d") else ()))
    arguments = ("--folder", lab.shared / "runs", "--sleep", "0.3", "--rows", "2400")
    programs = [
        node.launch(*options, _lab.SCRIPTS / "train.py", *arguments, "--timeout", str(TIMEOUT_S))
        for node in lab.nodes
    ]
    programs[0].wait_for("update 6.")
    before = [len(program.text) for program in programs]
    start = time.monotonic()
    event(lab, programs)
    said: dict[int, float] = {}
    ended: dict[int, float] = {}
    left = [number for number in (0, 1) if number != gone]
    while time.monotonic() - start < LIMIT_S and not all(number in ended for number in left):
        for number in left:
            program = programs[number]
            if "fxtrain launch:" in program.text[before[number] :]:
                said.setdefault(number, time.monotonic() - start)
            if program.code is not None:
                ended.setdefault(number, time.monotonic() - start)
        time.sleep(0.02)
    cells: list[str] = []
    for number in (0, 1):
        times = [times.get(number) for times in (said, ended)]
        cells += ["" if seconds is None else f"{seconds:.1f}" for seconds in times]
        cells.append("" if number not in ended else str(programs[number].code))
    return cells


if __name__ == "__main__":
    main(*sys.argv[1:])
