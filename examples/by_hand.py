"""A loop that keeps its forward and loss, by `fx.update` and by parts of a step, beside `fx.step`.

    fxtrain launch --ranks 2 examples/by_hand.py

Ends with one JSON line that says whether the three trained models are equal in every bit.
"""

import json

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

console = Console(stderr=True)
PLAN = fx.Plan(accumulate=3, batch="global", clip_norm=0.5, precision="bf16", seed=5)


def fresh_model(ctx: fx.DistContext) -> fx.Wrapped:
    """A model that starts from the same values every time."""
    with ops.fork_rng(ctx, 11):
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return fx.wrap(
        net,
        ctx,
        PLAN,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5),
    )


def main() -> None:
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    with fx.detect() as ctx:
        loader = fx.shard(DataLoader(data, batch_size=32, shuffle=True), ctx, PLAN)
        by_step, by_update, by_parts = (fresh_model(ctx) for _ in range(3))
        fns = fx.StepFns(model=by_step, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        updates = 0
        quiet = not (ctx.is_main and console.is_terminal)
        for epoch in track(loader.epochs(2), "epochs", total=2, console=console, disable=quiet):
            for batch in epoch:
                updates = fx.step(ctx, batch, fns).updates

                with ops.autocast(by_update):
                    loss = F.cross_entropy(by_update(batch[0]), batch[1])
                fx.update(ctx, batch, by_update, loss)

                with ops.autocast(by_parts):
                    loss = F.cross_entropy(by_parts(batch[0]), batch[1])
                ops.backward(loss, by_parts, batch)
                ops.apply(by_parts)
        models = (by_step, by_update, by_parts)
        triples = zip(*(model.parameters() for model in models), strict=True)
        same = all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in triples)
        equal = ops.all_ranks(same, ctx)
        result = {"ranks": ctx.world_size, "updates": updates, "equal": equal}
        ops.say(json.dumps(result), ctx)


if __name__ == "__main__":
    main()
