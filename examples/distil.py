"""Distillation with two plans in one process: a bf16 teacher, a small fp32 student.

    fxtrain launch --ranks 2 examples/distil.py

The teacher is trained first, then frozen; the student learns from its scores alone and never
sees a label. Ends with one JSON line of both accuracies.
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
TEACHER = fx.Plan(batch="global", precision="bf16", clip_norm=1.0, seed=1)
STUDENT = fx.Plan(batch="global", accumulate=2, seed=2)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=5e-3)


def train(name: str, fns: fx.StepFns, loader: fx.Sharded, ctx: fx.DistContext, epochs: int) -> None:
    quiet = not (ctx.is_main and console.is_terminal)
    for epoch in track(loader.epochs(epochs), name, total=epochs, console=console, disable=quiet):
        for batch in epoch:
            fx.step(ctx, batch, fns)


def accuracy(model: fx.Wrapped, loader: fx.Sharded, ctx: fx.DistContext) -> float:
    found: list[torch.Tensor] = []
    with torch.no_grad():
        for batch in loader:
            hits = model(batch[0]).argmax(-1) == batch[1]
            found.append(ops.gather_valid(hits, batch, ctx))
    return float(torch.cat(found).float().mean())


def main() -> None:
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    learn = TensorDataset(images[:1408], labels[:1408])
    test = TensorDataset(images[1408:], labels[1408:])
    with fx.detect() as ctx:
        ops.seed(0, ctx)
        teacher = fx.wrap(mlp(256), ctx, TEACHER, optimizer=adam)
        student = fx.wrap(mlp(16), ctx, STUDENT, optimizer=adam)

        def distil(model: fx.Wrapped, batch: fx.Batch) -> torch.Tensor:
            with torch.no_grad():
                wanted = teacher(batch[0]).float().softmax(-1)
            return F.cross_entropy(model(batch[0]), wanted)

        labeled = fx.StepFns(model=teacher, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        for plan, fns, name in (
            (TEACHER, labeled, "teacher"),
            (STUDENT, fx.StepFns(model=student, loss=distil), "student"),
        ):
            loader = fx.shard(DataLoader(learn, batch_size=32, shuffle=True), ctx, plan)
            train(name, fns, loader, ctx, epochs=12)
        held_out = fx.shard(DataLoader(test, batch_size=64), ctx)
        scores = {
            "teacher": accuracy(teacher, held_out, ctx),
            "student": accuracy(student, held_out, ctx),
        }
        ops.say(json.dumps({"ranks": ctx.world_size, **scores}), ctx)


if __name__ == "__main__":
    main()
