"""Time to the command line's help, and to the first line of a launched script.

python -m benchmarks.startup [ROUNDS]

Seconds of the processor, with those of the script's process, are shown beside those of the
clock, since they say more on a machine that has other work to do.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._common import show

ROUNDS = int(sys.argv[1]) if sys.argv[1:] else 7
# What the first line of the script has to say is when it ran.
SCRIPT = "import time; print(time.time(), flush=True)\n"
PYTHON = (sys.executable, "-m")
HELP = {
    "fxtrain --help": (*PYTHON, "fxtrain", "--help"),
    "torchrun --help": (*PYTHON, "torch.distributed.run", "--help"),
    "accelerate --help": (*PYTHON, "accelerate.commands.accelerate_cli", "--help"),
}
LAUNCH = {
    "fxtrain launch": (*PYTHON, "fxtrain", "launch", "--ranks", "1"),
    "torchrun": (*PYTHON, "torch.distributed.run", "--standalone", "--nproc-per-node", "1"),
    "accelerate launch": (
        *PYTHON, "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes", "1",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
    ),
}  # fmt: skip


def to_end(command: tuple[str, ...]) -> float:
    """Seconds that a command takes."""
    started = time.time()
    subprocess.run(command, check=True, capture_output=True)
    return time.time() - started


def to_first_line(command: tuple[str, ...], script: Path) -> float:
    """Seconds until the first line of a script runs."""
    started = time.time()
    done = subprocess.run((*command, str(script)), check=True, capture_output=True, text=True)
    return float(done.stdout.split()[0]) - started


def main():
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(SCRIPT)
        runs = {
            **{name: lambda c=c: to_end(c) for name, c in HELP.items()},
            **{
                f"{name}, first line": lambda c=c: to_first_line(c, script)
                for name, c in LAUNCH.items()
            },
        }
        clock, work = {name: [] for name in runs}, {name: [] for name in runs}
        for _ in range(ROUNDS):  # in turns, so that noise meets all of them alike
            for name, run in runs.items():
                before = processor_s()
                clock[name].append(run())
                work[name].append(processor_s() - before)
    rows = [
        [name, f"{statistics.median(times):.2f}", f"{min(times):.2f}", f"{min(work[name]):.2f}"]
        for name, times in clock.items()
    ]
    show("Start-up", ["what", f"s, median of {ROUNDS}", "s, least", "processor s, least"], rows)


def processor_s() -> float:
    """Processor time of all processes that were started from here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
