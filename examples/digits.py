"""Classify scikit-learn's handwritten digits, on any number of ranks.

    python examples/digits.py
    fxtrain launch --ranks 2 examples/digits.py
    PJRT_DEVICE=TPU python examples/digits.py --strategy xla

Ends with one JSON line from rank 0.
"""

import argparse
import json
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

console = Console(stderr=True)
STRATEGIES = {"ddp": fx.DDP(), "fsdp": fx.FSDP(), "xla": fx.XLA()}


def load() -> tuple[TensorDataset, TensorDataset]:
    """1498 digits to train on and 299 to test on: every sixth is held out."""
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(y)
    held_out = torch.arange(len(labels)) % 6 == 5
    return (
        TensorDataset(images[~held_out], labels[~held_out]),
        TensorDataset(images[held_out], labels[held_out]),
    )


def network() -> nn.Module:
    """A small convolutional network: (rows, 1, 8, 8) → (rows, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


def accuracy(model: fx.Wrapped, loader: fx.Sharded, ctx: fx.DistContext) -> float:
    """Share of correct guesses over exactly the rows of the data, on every rank."""
    model.eval()
    hits = rows = 0
    with torch.no_grad():
        for batch in loader:
            images, labels = batch
            guesses, truth = ops.gather_valid((model(images).argmax(-1), labels), batch, ctx)
            hits, rows = hits + int((guesses == truth).sum()), rows + len(truth)
    model.train()
    return hits / rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--strategy", default="ddp", choices=list(STRATEGIES))
    parser.add_argument("--accumulate", type=int, default=1)
    return parser.parse_args()


def progress(epoch: fx.Sharded, name: str, ctx: fx.DistContext) -> Iterable[fx.Batch]:
    """A bar in the terminal of rank 0; nothing in a pipe."""
    hidden = not (ctx.is_main and console.is_terminal)
    bar = {"console": console, "disable": hidden, "transient": True}
    return track(epoch, name, total=len(epoch), **bar)


def train(ctx: fx.DistContext, plan: fx.Plan, epochs: int) -> float:
    ops.seed(plan.seed, ctx)
    model = fx.wrap(
        network(),
        ctx,
        plan,
        optimizer=lambda params: torch.optim.AdamW(params, lr=4e-3),
        scheduler=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.995),
    )
    seen, unseen = load()
    loader = fx.shard(DataLoader(seen, batch_size=32, shuffle=True), ctx, plan)
    held_out = fx.shard(DataLoader(unseen, batch_size=64), ctx, plan)
    fns = fx.StepFns(model=model, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))

    table = Table("epoch", "updates", "loss", "accuracy", title=f"digits, {ctx.world_size} ranks")
    score = 0.0
    for epoch in loader.epochs(epochs):
        number = str(epoch.position.epoch)
        for batch in progress(epoch, f"epoch {number}", ctx):
            report = fx.step(ctx, batch, fns)
        loss, score = ops.reduce(report.loss, ctx), accuracy(model, held_out, ctx)
        table.add_row(number, str(report.position.updates), f"{loss:.3f}", f"{score:.3f}")
    ops.on_main(lambda: console.print(table), ctx)
    return score


def main() -> None:
    options = arguments()
    plan = fx.Plan(
        strategy=STRATEGIES[options.strategy],
        precision=options.precision,
        accumulate=options.accumulate,
        clip_norm=1.0,
        seed=7,
    )
    with fx.detect() as ctx:
        score = train(ctx, plan, options.epochs)
        ops.say(json.dumps({"ranks": ctx.world_size, "accuracy": score}), ctx)


if __name__ == "__main__":
    main()
