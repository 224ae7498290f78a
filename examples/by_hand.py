"""The step written out from `fxtrain.ops`, beside `fx.step`: the same parameters to the bit.

    fxtrain launch --ranks 2 examples/by_hand.py

Copy `hand_written_step` when a loop needs something that a step has no place for. Ends with
one JSON line that says whether the two trained models are equal in every bit.
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
PLAN = fx.Plan(accumulate=3, clip_norm=0.5, precision="bf16", seed=5)


def hand_written_step(model: fx.Wrapped, batch: fx.Batch) -> None:
    """One micro-batch, and the update where its window closes."""
    update_is_due = batch.position.micro == 0
    with ops.sync(model, enabled=update_is_due):
        with ops.autocast(model):
            loss = F.cross_entropy(model(batch[0]), batch[1])
        # Rows of the whole window over rows of this batch on all ranks: micro-batches in it.
        ops.backward(loss / (batch.window_rows / sum(batch.sizes)), model)
    if update_is_due:
        ops.clip_norm(model, PLAN.clip_norm)
        ops.apply(model)
        model.scheduler.step()


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
        mine, theirs = fresh_model(ctx), fresh_model(ctx)
        fns = fx.StepFns(model=theirs, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        quiet = not (ctx.is_main and console.is_terminal)
        for epoch in track(loader.epochs(2), "epochs", total=2, console=console, disable=quiet):
            for batch in epoch:
                hand_written_step(mine, batch)
                report = fx.step(ctx, batch, fns)
        pairs = zip(mine.parameters(), theirs.parameters(), strict=True)
        equal = ops.all_ranks(all(torch.equal(a, b) for a, b in pairs), ctx)
        result = {"ranks": ctx.world_size, "updates": report.position.updates, "equal": equal}
        ops.say(json.dumps(result), ctx)


if __name__ == "__main__":
    main()
