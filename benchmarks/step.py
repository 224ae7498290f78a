"""One process: what a step costs beside the raw loop, Accelerate and Lightning Fabric.

python -m benchmarks.step
"""

import itertools
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from benchmarks._common import by_hand, interleaved, python_calls, show

warnings.simplefilter("ignore")


def net():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def adam(params):
    return torch.optim.AdamW(params, lr=1e-3)


def raw(x, y):
    model = net()
    return by_hand(model, adam(model.parameters()), x, y)


def ours(x, y):
    ctx = fx.detect({}, device="cpu")
    plan = fx.Plan(clip_norm=1.0)
    model = fx.wrap(net(), ctx, plan, optimizer=adam)
    loader = fx.shard(DataLoader(TensorDataset(x, y), batch_size=len(x)), ctx, plan)
    batch = next(iter(loader))
    fns = fx.StepFns(model=model, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    return lambda: fx.step(ctx, batch, fns)


def accelerate(x, y):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(model, adam(model.parameters()))

    def run():
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return run


def fabric(x, y):
    from lightning_fabric import Fabric

    runner = Fabric(accelerator="cpu", devices=1)
    model = net()
    model, optimizer = runner.setup(model, adam(model.parameters()))

    def run():
        runner.backward(F.cross_entropy(model(x), y))
        runner.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def main():
    x, y = torch.randn(32, 64), torch.randint(0, 10, (32,))
    torch.set_num_threads(1)
    makers = {"raw loop": raw, "fxtrain": ours, "Accelerate": accelerate, "Fabric": fabric}
    runs = {name: make(x, y) for name, make in makers.items()}
    for run in runs.values():
        for _ in itertools.repeat(None, 200):
            run()
    calls = {name: python_calls(run) for name, run in runs.items()}
    times = interleaved(runs, rounds=200, each=20)
    base = times["raw loop"]
    added = times["Accelerate"] - base
    show(
        "A training step with clipping, two-layer network, 32 rows",
        ["loop", "calls", "calls added", "µs", "µs added", "of raw", "of Accelerate's addition"],
        [
            [
                name,
                str(calls[name]),
                str(calls[name] - calls["raw loop"]),
                f"{1e6 * times[name]:.0f}",
                f"{1e6 * (times[name] - base):.1f}",
                f"{times[name] / base:.3f}",
                f"{(times[name] - base) / added:.3f}",
            ]
            for name in runs
        ],
    )


if __name__ == "__main__":
    main()
