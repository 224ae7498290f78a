"""Replicas of fx.replicas.train: what an update costs, and how long a death and a return take.

The second replica is a launch with restarts and a spare, whose rank is killed and then frozen.

python -m benchmarks.elastic_replicas [repeats]
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchft.coordination import LighthouseServer

import fxtrain as fx
from benchmarks._common import show

REPEATS = 3
HEARTBEAT_MS = 500
UPDATES = 30  # of which the times count
WIDTH = 256
SPARE_S = 30.0  # in which a spare has imported torch, on a busy machine too
LAUNCH = ("fxtrain", "launch", "--cpu", "--restarts", "9", "--spares", "1", "-m")


def main(repeats: int = REPEATS) -> None:
    lighthouse = LighthouseServer(
        bind="[::]:0",
        min_replicas=1,
        join_timeout_ms=60_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=HEARTBEAT_MS,
    )
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    with tempfile.TemporaryDirectory() as folder:
        found = [_once(address, Path(folder)) for _ in range(repeats)]
    names = list(found[0])
    show(
        f"Two replicas of one rank, of which one is killed ({repeats} times, medians)",
        ("", "median", "worst"),
        [
            (name, *(f"{value:.3f}" for value in (statistics.median(values), max(values))))
            for name, values in ((name, [one[name] for one in found]) for name in names)
        ],
    )


def _once(address: str, folder: Path) -> dict[str, float]:
    started: list[subprocess.Popen] = []

    def begin(name: str, *launch: str) -> Path:
        out = folder / f"{time.time()}-{name}"
        words = (sys.executable, "-m", *launch, "benchmarks.elastic_replicas", "train", address)
        variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        with out.open("wb") as file:
            started.append(
                subprocess.Popen(
                    words, stdout=file, stderr=subprocess.DEVNULL, cwd=folder, env=variables
                )
            )
        return out

    try:
        first = begin("first")
        second = begin("second", *LAUNCH)
        both = _wait(first, lambda line: line["live"] == 2)["update"]
        before = _wait(second, lambda line: "up" in line)
        _wait(second, lambda line: line["update"] > both + UPDATES)
        time.sleep(SPARE_S)
        os.kill(before["pid"], signal.SIGKILL)
        killed = time.time()
        up = _wait(second, lambda line: line.get("up", 0) > killed)
        healed = _wait(second, lambda line: line["time"] > killed and line["healed"])
        _wait(first, lambda line: line["update"] > healed["update"] + 5)
        os.kill(up["pid"], signal.SIGSTOP)
        stopped = time.time()
        without = _wait(first, lambda line: line["time"] > stopped and line["live"] == 1)
        os.kill(up["pid"], signal.SIGCONT)
        lines = [line for line in _lines(first) if "update" in line]
    finally:
        for process in started:
            process.terminate()
            process.wait()
    gaps = [(after["time"] - before["time"], after) for before, after in pairwise(lines)]
    together = [gap for gap, line in gaps if both + 2 < line["update"] < both + UPDATES]
    # The spare may be back before the other has made an update without it.
    noticed = max((gap, line["time"]) for gap, line in gaps if killed < line["time"] < stopped)
    return {
        "s: an update of two replicas": statistics.median(together),
        "s: killed, to the end of the update in which it is missed": noticed[1] - killed,
        "s: killed, to the first line of its spare": up["up"] - killed,
        "s: killed, to its first update again": healed["time"] - killed,
        "s: frozen, to the end of the next update": without["time"] - stopped,
        "s: longest update of the other meanwhile": noticed[0],
    }


def _wait(out: Path, condition):
    while True:
        for line in _lines(out):
            if "update" in line or "up" in line:
                try:
                    if condition(line):
                        return line
                except KeyError:
                    continue
        time.sleep(0.01)


def _lines(out: Path):
    return [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]


def _train(address: str) -> None:
    x = torch.randn(4096, WIDTH, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32, shuffle=True)
    with fx.detect(env={}, device="cpu") as ctx:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        model = fx.wrap(net, ctx, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
        fns = fx.StepFns(model=model, loss=lambda m, b: F.mse_loss(m(b[0]), b[1]))
        rows = fx.shard(data, ctx)
        team = fx.replicas.Replicas(count=2, lighthouse=address, timeout_s=20)
        print(json.dumps({"up": time.time(), "pid": os.getpid()}), flush=True)
        for update in fx.replicas.train(ctx, fns, rows, team, updates=10**9):
            line = {"time": time.time(), "update": update.updates, "live": update.live}
            print(json.dumps({**line, "healed": update.healed}), flush=True)
            time.sleep(0.02)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        os.environ["OMP_NUM_THREADS"] = "1"
        _train(sys.argv[2])
    else:
        main(*map(int, sys.argv[1:]))
