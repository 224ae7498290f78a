"""Training while an adversary kills, freezes, cuts off, fills and damages: fxtrain and Accelerate.

python -m benchmarks.chaos [--seconds 240] [--seed 0] [--json FILE] [--only fxtrain]

Two machines made of namespaces, with two ranks each, lose ranks, launchers, networks and disks at
times that are drawn from a seed, the same for both programs. A launcher that ends is started again
after a second, as a cluster's scheduler would. Needs root.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._common import show, tell
from benchmarks.chaos._adversary import NODES, draw_events
from benchmarks.chaos._run import PROGRAMS, Outcome, run
from tests.nodes import _lab

EVERY_S = 15.0
ALONE_S = 20.0
DISK = "96m"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=240.0, help="of each program")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between events")
    parser.add_argument("--alone", type=float, default=ALONE_S, help="seconds without events")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=list(PROGRAMS))
    parser.add_argument("--show", action="store_true", help="what launchers and ranks wrote")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is None:
        sys.exit(_with_own_mounts(sys.argv[1:]))
    names = [options.only] if options.only else list(PROGRAMS)
    events = draw_events(options.seed, options.seconds, options.every)
    found = {}
    disk = options.folder / "disk"
    with _lab.opened(options.folder / "lab", NODES, "10.91.8") as lab:
        for name in names:
            tell(f"{name}: {options.seconds:.0f} s with {len(events)} events")
            chaos = run(lab, disk, name, events, options.seconds)
            tell(f"{name}: left alone")
            alone = run(lab, disk, name, [], options.alone, max(chaos.made()))
            found[name] = figures(alone, chaos)
            if options.show:
                print(chaos.text, file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    report(found, options, len(events))


def _with_own_mounts(words: list[str]) -> int:
    """This program again, where a small disk is mounted that ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="fxtrain-chaos-"))
    (folder / "disk").mkdir()
    mount = f"mount -t tmpfs -o size={DISK} none {folder}/disk"
    program = (sys.executable, "-m", "benchmarks.chaos", "--folder", str(folder), *words)
    try:
        return subprocess.run(
            ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh", *program), check=False
        ).returncode
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def figures(alone: Outcome, chaos: Outcome) -> dict:
    """The figures of a program, and what followed each event."""
    rows, bits = chaos.compare(alone)
    noticed, recovered = chaos.noticed(), chaos.recovered()
    said = [each for each in noticed if each is not None]
    return {
        "updates a second, left alone": alone.rate(),
        "updates a second": chaos.rate(),
        "goodput": chaos.rate() / alone.rate(),
        "s to notice, median": statistics.median(said) if said else None,
        "s to notice, worst": max(said, default=None),
        "s to recover, median": statistics.median(recovered),
        "s to recover, worst": max(recovered),
        "launchers that ended": chaos.ends,
        "rows lost or repeated": rows,
        "updates with other bits": bits,
        "events": [
            {"kind": event.kind, "node": event.node, "noticed_s": first, "recovered_s": then}
            for (event, _), first, then in zip(chaos.happened, noticed, recovered, strict=True)
        ],
    }


def report(found: dict[str, dict], options: argparse.Namespace, count: int) -> None:
    """Print the figures, and the pause after each event."""

    def cell(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)

    rows = [
        [name, *(cell(one[name]) for one in found.values())]
        for name in next(iter(found.values()))
        if name != "events"
    ]
    show(f"{count} events in {options.seconds:.0f} s, seed {options.seed}", ["", *found], rows)
    rows = []
    for each in zip(*(one["events"] for one in found.values()), strict=True):
        times = [f"{cell(e['noticed_s'])} / {cell(e['recovered_s'])}" for e in each]
        rows.append([f"{each[0]['kind']} (n{each[0]['node']})", *times])
    show("Seconds until something was said, and until new updates", ["event", *found], rows)


main()
