"""Classify scikit-learn's handwritten digits, on any number of ranks.

    python examples/digits.py
    fxtrain launch --ranks 2 examples/digits.py
    PJRT_DEVICE=TPU python examples/digits.py --strategy xla

Ends with one JSON line from rank 0.
"""

import argparse
import json
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

console = Console(stderr=True)
STRATEGIES = {"ddp": fx.DDP(), "fsdp": fx.FSDP(), "xla": fx.XLA()}


def load() -> tuple[TensorDataset, TensorDataset]:
    """1472 digits to train on and 299 to test on: every sixth is held out."""
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(y)
    held_out = torch.arange(len(labels)) % 6 == 5
    return (
        TensorDataset(images[~held_out][:1472], labels[~held_out][:1472]),  # 46 × 32
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


def measures(model: fx.Wrapped, batch: fx.Batch) -> dict[str, torch.Tensor]:
    """Loss and hits of every row."""
    logits = model(batch[0])
    return {
        "loss": F.cross_entropy(logits, batch[1], reduction="none"),
        "accuracy": logits.argmax(-1) == batch[1],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--strategy", default="ddp", choices=list(STRATEGIES))
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--folder", help="of a run to begin or continue; else a temporary one")
    return parser.parse_args()


def train(ctx: fx.DistContext, plan: fx.Plan, folder: str, epochs: int) -> float:
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
    held_out = DataLoader(unseen, batch_size=64)
    fns = fx.StepFns(model=model, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))

    table = Table("epoch", "updates", "loss", "accuracy", title=f"digits, {ctx.world_size} ranks")
    found: dict[str, Any] = {}
    for report in fx.fit(
        ctx,
        fns,
        loader,
        folder,
        epochs=epochs,
        keep_last=1,
        keep_best=1,
        metric="accuracy",
        best="max",
        evaluate=lambda: fx.evaluate(ctx, model, held_out, measures),
    ):
        if report.metrics is not None:
            found, place = report.metrics, report.position
            row = (f"{found['loss']:.3f}", f"{found['accuracy']:.3f}")
            table.add_row(str(place.epoch), str(place.updates), *row)
    found = found or fx.evaluate(ctx, model, held_out, measures)  # the run was over already
    ops.on_main(lambda: console.print(table), ctx)
    return found["accuracy"]


def main() -> None:
    options = arguments()
    plan = fx.Plan(
        strategy=STRATEGIES[options.strategy],
        precision=options.precision,
        accumulate=options.accumulate,
        batch="global",
        clip_norm=1.0,
        seed=7,
    )
    with fx.detect() as ctx:
        with tempfile.TemporaryDirectory() as temporary:
            folder = options.folder or ops.broadcast_object(temporary, ctx)
            score = train(ctx, plan, folder, options.epochs)
        ops.say(json.dumps({"ranks": ctx.world_size, "accuracy": score}), ctx)


if __name__ == "__main__":
    main()
