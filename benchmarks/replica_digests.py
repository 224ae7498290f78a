"""Two ranks: a check of replicas, beside the training step of which every 100th has one.

python -m benchmarks.replica_digests
"""

import torch
from torch import nn

import fxtrain as fx
from benchmarks._common import interleaved, show
from fxtrain.backends.core.replica_digests import verify_replicas
from fxtrain.testing import Cluster

EVERY = 100
ROWS, TOKENS, WIDTH = 1, 32, 512  # a small batch, which makes the step short beside the check


def _layers():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True) for _ in range(8))
    )


def _compare(ctx):
    """Seconds of a step and of a check, and bytes of parameters and states."""
    torch.set_num_threads(1)
    plan = fx.Plan()
    model = fx.wrap(_layers(), ctx, plan, optimizer=torch.optim.AdamW)
    fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
    batch = fx.batch(torch.randn(ROWS, TOKENS, WIDTH), ctx, plan)
    fx.step(ctx, batch, fns)
    parameters = sum(one.numel() * one.element_size() for one in model.module.parameters())
    runs = {"step": lambda: fx.step(ctx, batch, fns), "check": lambda: verify_replicas(model)}
    return interleaved(runs, rounds=9, each=1), 3 * parameters


def main():
    pair = Cluster(2, call_s=300)
    times, size = pair.run(_compare)[0]
    pair.close()
    step, check = times["step"], times["check"]
    share = 100 * check / (EVERY * step)
    row = [
        f"{size / 2**20:.0f} MiB",
        f"{1e3 * step:.0f} ms",
        f"{1e3 * check:.0f} ms",
        f"{share:.2f} %",
    ]
    columns = ["parameters and states", "a step", "a check", f"of {EVERY} steps"]
    show("Checks of replicas (DDP, AdamW)", columns, [row])


if __name__ == "__main__":
    main()
