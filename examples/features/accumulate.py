"""Gradient accumulation: four micro-batches of 16 rows make the update of one batch of 64.

    python examples/features/accumulate.py
    fxtrain launch --ranks 2 examples/features/accumulate.py

`Plan(accumulate=4)` is all: no loop divides a loss, counts micro-batches or skips a reduction.
Under `even="uneven"` the last window of an epoch counts for exactly the rows that it has. Ends with
one JSON line: updates, the loss on all rows, and how far the parameters are from those of training
without accumulation.
"""

import json

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops


def train(ctx: fx.DistContext, size: int, accumulate: int) -> tuple[fx.Wrapped, dict[str, float]]:
    """Train on windows of `size * accumulate` rows of all ranks together."""
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x) / 16, torch.tensor(y))
    plan = fx.Plan(accumulate=accumulate, batch="global", even="uneven", clip_norm=1.0, seed=3)
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10, dtype=torch.float64)
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    loader = fx.shard(DataLoader(data, batch_size=size, shuffle=True), ctx, plan)
    for epoch in loader.epochs(2):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    loss = fx.evaluate(ctx, model, DataLoader(data, batch_size=256), fns.loss)
    return model, {"updates": loader.total_updates(2), "loss": loss}


def main(ctx: fx.DistContext) -> dict[str, float]:
    whole, _ = train(ctx, 64, 1)
    model, told = train(ctx, 16, 4)
    pairs = zip(whole.parameters(), model.parameters(), strict=True)
    return {**told, "apart": max((a - b).abs().max().item() for a, b in pairs)}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
