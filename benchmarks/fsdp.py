"""Two ranks: an FSDP step and a TP step beside the same steps written by hand on torch.

python -m benchmarks.fsdp
"""

import statistics
import time
import warnings

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from benchmarks._common import show
from fxtrain.testing import count_collectives

WIDTH, BLOCKS = 192, 4
CUTS = (
    fx.Style(modules="blocks.*.up", style="colwise"),
    fx.Style(modules="blocks.*.down", style="rowwise"),
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _net():
    torch.manual_seed(0)
    return Net()


def _adam(params):
    return torch.optim.AdamW(params, lr=1e-3)


def _step_by_hand(model, x, y):
    optimizer = _adam(model.parameters())

    def run():
        F.cross_entropy(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm.full_tensor()  # as a number to log, which fxtrain's report has
        optimizer.step()
        optimizer.zero_grad()

    return run


def _fsdp_by_hand(x, y):
    model = _net()
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return _step_by_hand(model, x, y)


def _tp_by_hand(x, y):
    # Without a norm, which torch does not take over plain and split gradients together.
    model = _net()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def run():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _ours(ctx, x, y, plan):
    model = fx.wrap(_net(), ctx, plan, optimizer=_adam)
    ranks = ctx.axis("data").world_size
    data = TensorDataset(x.repeat(ranks, 1), y.repeat(ranks))
    batch = next(iter(fx.shard(DataLoader(data, batch_size=len(x)), ctx, plan)))
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    return lambda: fx.step(ctx, batch, fns)


def measure(rounds):
    """On rank 0: median seconds per step, and the collectives and bytes of one."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with fx.detect(device="cpu") as ctx:
        split = fx.detect(device="cpu", mesh=fx.Mesh(tensor=2))
        x, y = torch.randn(128, WIDTH), torch.randint(0, 10, (128,))
        runs = {
            "FSDP by hand": _fsdp_by_hand(x, y),
            "FSDP": _ours(ctx, x, y, fx.Plan(strategy=fx.FSDP(), clip_norm=1.0)),
            "TP by hand": _tp_by_hand(x, y),
            "TP": _ours(split, x, y, fx.Plan(strategy=fx.FSDP(tensor=fx.TP(styles=CUTS)))),
        }
        times = {name: [] for name in runs}
        for round_number in range(rounds):
            for name, run in runs.items():
                dist.barrier()
                started = time.perf_counter()
                for _ in range(3):
                    run()
                if round_number >= rounds // 8:
                    times[name].append((time.perf_counter() - started) / 3)
        traffic = {}
        for name, run in runs.items():
            with count_collectives() as counted:
                run()
            traffic[name] = (dict(counted.counts), counted.bytes)
        return {name: statistics.median(taken) for name, taken in times.items()}, traffic


def main():
    (times, traffic), _ = fx.launch(measure, (60,), ranks=2)
    rows = []
    for name, taken in times.items():
        base = times[name if name.endswith("hand") else f"{name} by hand"]
        calls, sent = traffic[name]
        what = ", ".join(f"{count} {kind}" for kind, count in sorted(calls.items()))
        rows.append(
            [name, f"{1e3 * taken:.1f}", f"{base / taken:.3f}", what, f"{sum(sent.values()):,}"]
        )
    columns = ["how", "ms", "speed against by hand", "collectives", "bytes"]
    show("A sharded step, two ranks, gloo", columns, rows)


if __name__ == "__main__":
    main()
