"""FSDP and the memory that it saves: measured on these ranks, and predicted for 64.

    python examples/features/fsdp_memory.py
    fxtrain launch --ranks 2 examples/features/fsdp_memory.py

Only the plan differs between the runs. On one process, `fx.dry_run` also calls the same function as
one of 64 ranks that do not exist (`fxtrain plan --world 64` does so for a whole script). Ends with
one JSON line, for each plan: the loss, MiB of parameters and optimizer states on this rank, and the
predicted peak of a step on 64 ranks in MiB.
"""

import json

import attrs
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

PLANS = {
    "ddp": fx.Plan(batch="global"),
    "fsdp": fx.Plan(strategy=fx.FSDP(wrap=("Block",)), batch="global"),
    "fsdp, recomputed": fx.Plan(
        strategy=fx.FSDP(wrap=("Block",)), batch="global", recompute=("Block",)
    ),
}
MIB = 2**20


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


def train(ctx: fx.DistContext, plan: fx.Plan) -> tuple[fx.Wrapped, torch.Tensor]:
    """Eight updates; the wrapped model and the last loss of this rank."""
    x, y = load_digits(return_X_y=True)
    rows = torch.arange(12_288) % len(y)
    data = TensorDataset(torch.tensor(x).float()[rows] / 16, torch.tensor(y)[rows])
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), *(Block() for _ in range(4)), nn.Linear(256, 10))
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    for batch in fx.shard(DataLoader(data, batch_size=64), ctx, plan):
        report = fx.step(ctx, batch, fns)
        if report.updates == 8:
            return model, report.loss
    raise SystemExit("the data ends before update 8")


def held(model: fx.Wrapped) -> int:
    """Bytes of parameters and optimizer states on this rank."""
    states = [v for s in model.optimizer.state.values() for v in s.values()]
    tensors = [v for v in (*model.parameters(), *states) if isinstance(v, torch.Tensor)]
    local = [v.to_local() if isinstance(v, DTensor) else v for v in tensors]
    return sum(v.numel() * v.element_size() for v in local)


def main(ctx: fx.DistContext) -> dict[str, dict[str, float]]:
    told: dict[str, dict[str, float]] = {}
    for name, plan in PLANS.items():
        model, loss = train(ctx, plan)
        told[name] = {"loss": float(ops.reduce(loss, ctx)), "held_mib": held(model) / MIB}
        if ctx.world_size == 1:  # a dry run opens a process group of its own
            wide = attrs.evolve(plan, batch="per_rank")
            run = fx.dry_run(lambda other, plan=wide: train(other, plan), world=64)
            told[name]["peak_of_64_mib"] = run.peak / MIB
    return told


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
