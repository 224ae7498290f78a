"""Import time over torch's own, each in fresh processes.

python -m benchmarks.imports
"""

import os
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
    # As after an installation: bytecode is written once. Where it is not, the interpreter
    # compiles the sources in every process, which takes longer than to import them.
    env = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    taken = {name: [] for name in CASES}
    for _ in range(8):
        for name, code in CASES.items():
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", CODE.format(code)],
                check=True,
                capture_output=True,
                text=True,
                env=env,
            )
            taken[name].append(float(done.stdout.split()[-1]))
    rows = [[name, f"{statistics.median(times[1:]):.3f}"] for name, times in taken.items()]
    show("Import time over `import torch`", ["what", "s, median of 7"], rows)


if __name__ == "__main__":
    main()
