"""Import time over torch's own, each in fresh processes.

python -m benchmarks.imports
"""

import statistics
import subprocess
import sys

from benchmarks._common import show

CODE = "import torch, time; t = time.perf_counter(); {0}; print(time.perf_counter() - t)"
CASES = {
    "import fxtrain": "import fxtrain",
    "import fxtrain, and every public name": "from fxtrain import *",
    "import accelerate": "import accelerate",
    "import lightning_fabric": "import lightning_fabric",
}


def main():
    taken = {name: [] for name in CASES}
    for _ in range(7):
        for name, code in CASES.items():
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", CODE.format(code)],
                check=True,
                capture_output=True,
                text=True,
            )
            taken[name].append(float(done.stdout.split()[-1]))
    rows = [[name, f"{statistics.median(times):.3f}"] for name, times in taken.items()]
    show("Import time over `import torch`", ["what", "s, median of 7"], rows)


if __name__ == "__main__":
    main()
