"""What naming slow ranks and watching for hangs adds to a step of two ranks, in microseconds.

python -m benchmarks.watch
"""

import os
import tempfile
import time
from pathlib import Path

import attrs
import torch
from torch import nn

import fxtrain as fx
from benchmarks._common import show
from fxtrain.diagnosis.standing import _TICK_S, _Watch
from fxtrain.ops.transport.pace import Pace
from fxtrain.testing import Cluster

STEPS, TICKS, SLICES = 20_000, 4_000, 40  # the best of so many slices counts
STEP_S = 0.010  # a step beside which the watch looks


def _costs(ctx):
    """Seconds of the pace in a step, and of one look of the watch's thread."""
    model = fx.wrap(nn.Linear(8, 1), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    pace = ctx.comm.slot(Pace)
    quiet = attrs.evolve(ctx, comm=attrs.evolve(ctx.comm, store=None))
    best = []
    for _ in range(SLICES):
        began = time.perf_counter()
        for _ in range(STEPS // SLICES):  # as in a step: a loss function and an optimizer
            pace.begin("cpu")
            pace.add(pace.now("cpu"), "cpu")
            pace.add(pace.now("cpu"), "cpu")
            pace.end(quiet)
        best.append((time.perf_counter() - began) / (STEPS // SLICES))
    with tempfile.TemporaryDirectory() as folder:
        watch = _Watch(ctx, Path(folder))
        looks = []
        for _ in range(SLICES):
            began = time.perf_counter()
            for _ in range(TICKS // SLICES):  # what `run` does at each tick
                (watch._folder / "ask").exists()
                watch._progress()
                os.fstat(watch._stacks)
                watch._arm()
            looks.append((time.perf_counter() - began) / (TICKS // SLICES))
        watch._stopped.set()
        watch.start()
        watch.stop()
    del model
    return min(best), min(looks)


def main():
    pair = Cluster(2, call_s=120)
    pace, look = pair.run(_costs)[0]
    pair.close()
    rows = [
        ("pace of the rank, each step", f"{1e6 * pace:.2f}"),
        ("a look of the watch", f"{1e6 * look:.2f}"),
        (f"the same, per step of {1e3 * STEP_S:.0f} ms", f"{1e6 * look * STEP_S / _TICK_S:.2f}"),
        ("together per step", f"{1e6 * (pace + look * STEP_S / _TICK_S):.2f}"),
    ]
    show("Slow ranks and hangs (two ranks; at most 5 µs a step)", ("", "µs"), rows)


if __name__ == "__main__":
    main()
