"""Training, and the fastest plan that fits 8 GPUs with little memory, from dry runs.

    python examples/features/choose_plan.py
    fxtrain launch --ranks 2 examples/features/choose_plan.py

On one process, `fx.tuning.choose` tries plans for 8 GPUs that do not exist (`fxtrain plan --choose`
does so for a whole script). Ends with one JSON line: the loss and, by MiB of a device, strategy,
batch size, micro-batches of an update, whether blocks are recomputed, and the peak in MiB.
"""

import json

import attrs
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

MIB = 2**20
ROWS = 512  # of an update


class Block(nn.Module):
    """A residual block: (rows, 256) → (rows, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(256),
            nn.Linear(256, 1024),
            nn.Linear(1024, 256),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Digits: (rows, 64) → (rows, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 256), nn.Linear(256, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def train(ctx: fx.DistContext, size: int, plan: fx.Plan) -> torch.Tensor:
    """Four updates with batches of a size under a plan; the last loss of this rank."""
    x, y = load_digits(return_X_y=True)
    rows = torch.arange(8 * ROWS) % len(y)
    data = TensorDataset(torch.tensor(x).float()[rows] / 16, torch.tensor(y)[rows])
    torch.manual_seed(0)
    model = fx.wrap(Net(), ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    for batch in fx.shard(DataLoader(data, batch_size=size), ctx, plan):
        report = fx.step(ctx, batch, fns)
        if report.updates == 4:
            return report.loss
    raise SystemExit("the data ends before update 4")


def chosen(mib: int) -> dict[str, object]:
    """The plan for 8 GPUs with so much memory."""
    device = attrs.evolve(fx.state.read_device("H100"), name=f"{mib} MiB", memory=mib * MIB)
    choice = fx.tuning.choose(train, world=8, device=device, rows=ROWS, processes=1)
    best = choice.best
    return {
        "strategy": best.plan.strategy.kind,
        "batch_size": best.batch_size,
        "accumulate": best.plan.accumulate,
        "recompute": bool(best.plan.recompute),
        "peak_mib": best.memory / MIB,
    }


def main(ctx: fx.DistContext) -> dict[str, object]:
    loss = train(ctx, ROWS, fx.Plan(batch="global"))
    told: dict[str, object] = {"loss": float(ops.reduce(loss, ctx))}
    if ctx.world_size == 1:  # a dry run opens a process group of its own
        told["devices"] = {str(mib): chosen(mib) for mib in (12,)}
    return told


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
