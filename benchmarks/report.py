"""`fxtrain report` on ten million logged points, in a fresh process.

python -m benchmarks.report
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._common import show

LINES, METRICS = 1_000_000, 10


def _write(folder: Path):
    """A run as `fx.JsonLines()` writes it; random numbers have as many digits as real ones."""
    draw = random.Random(0).random
    text = json.JSONEncoder(separators=(",", ":")).encode
    with (folder / "metrics.jsonl").open("w") as file:
        start = {"id": "0" * 32, "name": "run", "params": {}}
        file.write(text({"step": 0, "time": 0.5, "start": start}) + "\n")
        for at in range(1, LINES + 1):
            values = {f"metric{number}": draw() for number in range(METRICS)}
            line = {"step": at, "rows": 32 * at, "epoch": 0, "time": 0.5 + at, "values": values}
            file.write(text(line) + "\n")
    return (folder / "metrics.jsonl").stat().st_size


def main():
    with tempfile.TemporaryDirectory() as name:
        size = _write(Path(name))
        page = Path(name) / "report.html"
        taken = []
        for _ in range(3):
            started = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "fxtrain", "report", name, "--output", str(page)],
                check=True,
                capture_output=True,
            )
            taken.append(time.perf_counter() - started)
        show(
            f"fxtrain report: {LINES * METRICS:,} points, {size / 1e6:.0f} MB of JSON lines, "
            f"{os.cpu_count()} cores",
            ["s, fastest of 3", "MB of the page"],
            [[f"{min(taken):.1f}", f"{page.stat().st_size / 1e6:.2f}"]],
        )


if __name__ == "__main__":
    main()
