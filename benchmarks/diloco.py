"""Replicas over a bad network: DDP against DiLoCo, its fragments, and its eight bits. Needs root.

python -m benchmarks.diloco [updates]
"""

import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import fxtrain as fx
from benchmarks._common import show, tell
from tests.nodes import _lab

UPDATES, EVERY = 100, 10
DELAY_S, MBIT = 0.05, 100
WIDTH, BATCH, HELD_OUT = 1024, 32, 397
UPDATE_S = 0.02  # what a larger model would compute
_DILOCO = {"every": EVERY, "outer_lr": 0.7, "outer_momentum": 0.6}
LOCALS = {
    "DDP": None,
    "DiLoCo": fx.DiLoCo(**_DILOCO),
    "DiLoCo, 2 fragments": fx.DiLoCo(**_DILOCO, fragments=2),
    "DiLoCo, 2 fragments, delay 4": fx.DiLoCo(**_DILOCO, fragments=2, delay=4),
    "DiLoCo, int8": fx.DiLoCo(**_DILOCO, compress="int8"),
    "DiLoCo, 2 fragments, delay 4, int8": fx.DiLoCo(
        **_DILOCO, fragments=2, delay=4, compress="int8"
    ),
}


def main(updates: int = UPDATES) -> None:
    if problem := _lab.problem():
        tell(problem)
        return
    rows: list[list[str]] = []
    with (
        tempfile.TemporaryDirectory(prefix="fxtrain-diloco-") as folder,
        _lab.opened(Path(folder) / "lab", 2, "10.91.9") as lab,
        slow(lab),
    ):
        for name in LOCALS:
            tell(name)
            found, sent = run(lab, name, updates)
            per_update = found["seconds"] / updates
            cells = [f"{1e3 * per_update:.0f}", f"{EVERY * per_update:.2f}"]
            cells += [f"{sent / updates / 1e6:.2f}", f"{found['loss']:.4f}"]
            rows.append([name, *cells, f"{found['right']:.1%}"])
    columns = ["", "ms an update", f"s for {EVERY}", "MB sent an update", "loss", "right"]
    size = sum(p.numel() for p in make_model().parameters()) * 4e-6
    show(
        f"{size:.1f} MB of parameters, {updates} updates, two machines, "
        f"{1e3 * DELAY_S:.0f} ms each way, {MBIT} Mbit/s",
        columns,
        rows,
    )


@contextlib.contextmanager
def slow(lab: _lab.Lab):
    """A network with a delay and a limited rate."""
    limit = ("tbf", "rate", f"{MBIT}mbit", "burst", "128kb", "latency", "400ms")
    with lab.slow_network(DELAY_S):
        for node in lab.nodes:
            node.run("tc", "qdisc", "add", "dev", "eth0", "root", *limit)
        yield


def run(lab: _lab.Lab, name: str, updates: int) -> tuple[dict, float]:
    """What rank 0 measured, and the bytes that its machine sent meanwhile."""
    before = _sent(lab.nodes[0])
    programs: list[_lab.Program] = []
    for node in lab.nodes:
        env = {
            "RANK": str(node.number),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": lab.address(0),
            "MASTER_PORT": "29500",
        }
        words = ("-m", "benchmarks.diloco", "train", name, str(updates))
        programs.append(node.start(*words, env=env))
    if any(program.finish(600) for program in programs):
        raise RuntimeError("\n".join(program.text for program in programs))
    return json.loads(programs[0].text.splitlines()[-1]), _sent(lab.nodes[0]) - before


def _sent(node: _lab.Node) -> int:
    (link,) = json.loads(node.run("ip", "-json", "-statistics", "link", "show", "eth0"))
    return link["stats64"]["tx"]["bytes"]


def make_model() -> nn.Module:
    """The same values in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


def train(name: str, updates: int) -> None:
    """What a rank does: handwritten digits, of which some are held out."""
    images, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    # Many passes are one epoch, since the end of an epoch waits for everything under way.
    data = ConcatDataset([TensorDataset(x[HELD_OUT:], y[HELD_OUT:])] * 20)
    plan = fx.Plan(local=LOCALS[name], seed=5)
    with fx.detect(device="cpu", timeout_s=120) as ctx:
        model = fx.wrap(make_model(), ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4))
        loader = fx.shard(DataLoader(data, batch_size=BATCH, shuffle=True), ctx, plan)
        fns = fx.StepFns(model=model, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        fx.ops.barrier(ctx)
        started = time.perf_counter()
        for batch in loader.updates(updates):
            fx.step(ctx, batch, fns)
            time.sleep(UPDATE_S)
        fx.ops.average(model)
        seconds = time.perf_counter() - started
        with torch.no_grad():
            out = model.module(x[:HELD_OUT])
        found = {
            "seconds": seconds,
            "loss": F.cross_entropy(out, y[:HELD_OUT]).item(),
            "right": (out.argmax(1) == y[:HELD_OUT]).float().mean().item(),
        }
        if ctx.is_main:
            sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], int(sys.argv[3]))
    else:
        main(*map(int, sys.argv[1:]))
