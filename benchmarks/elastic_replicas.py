"""Replicas of fx.replicas.train: what an update costs, and how long a death and a return take.

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

    def begin(name: str) -> Path:
        out = folder / f"{len(started)}-{name}"
        words = (sys.executable, "-m", "benchmarks.elastic_replicas", "train", address)
        with out.open("wb") as file:
            started.append(subprocess.Popen(words, stdout=file, stderr=subprocess.DEVNULL))
        return out

    try:
        first, second = begin("first"), begin("second")
        both = _wait(first, lambda line: line["live"] == 2)["update"]
        _wait(second, lambda line: line["update"] > both + UPDATES)
        started[1].send_signal(signal.SIGKILL)
        killed = time.time()
        alone = _wait(first, lambda line: line["time"] > killed and line["live"] == 1)
        restarted = time.time()
        third = begin("third")
        up = _wait(third, lambda line: "up" in line)["up"]
        healed = _wait(third, lambda line: line.get("healed", False))
        _wait(first, lambda line: line["update"] > healed["update"] + 5)
        lines = [line for line in _lines(first) if "update" in line]
    finally:
        for process in started:
            process.kill()
            process.wait()
    gaps = [(after["time"] - before["time"], after) for before, after in pairwise(lines)]
    together = [gap for gap, line in gaps if both + 2 < line["update"] < both + UPDATES]
    joined = [gap for gap, line in gaps if abs(line["update"] - healed["update"]) < 2]
    return {
        "s: an update of two replicas": statistics.median(together),
        "s: killed, to the end of the next update": alone["time"] - killed,
        "s: started again, to its first line": up - restarted,
        "s: first line, to its first update": healed["time"] - up,
        "s: longest update of the other meanwhile": max(joined),
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
        print(json.dumps({"up": time.time()}), flush=True)
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
