"""Distillation from a live teacher: a function of the position makes every batch.

    fxtrain launch --ranks 2 examples/live_teacher.py

The teacher learns handwritten digits. The student never sees a label or a picture of the data
set: it learns from the answers of the teacher to pictures that are mixed for it on the fly. Ends
with one JSON line of both accuracies.
"""

import json

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

PLAN = fx.Plan(batch="global", seed=1)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=5e-3)


def accuracy(model: fx.Wrapped, batch: fx.Batch) -> fx.Weighted:
    hits = model(batch[0]).argmax(-1) == batch[1]
    return fx.Weighted(hits.float().sum(), len(hits))


def main() -> None:
    x, y = load_digits(return_X_y=True)
    images, labels = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    learn = TensorDataset(images[:1408], labels[:1408])
    test = TensorDataset(images[1408:], labels[1408:])
    with fx.detect() as ctx:
        ops.seed(0, ctx)
        teacher = fx.wrap(mlp(128), ctx, PLAN, optimizer=adam)
        fns = fx.StepFns(model=teacher, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        table = fx.shard(DataLoader(learn, batch_size=64, shuffle=True), ctx, PLAN)
        for batch in table.updates(200):
            fx.step(ctx, batch, fns)

        @torch.no_grad()
        def taught(position: fx.Position) -> tuple[Tensor, Tensor]:
            """64 pictures, each mixed from two, and what the teacher says of them."""
            numbers = torch.Generator().manual_seed(position.samples)
            first, second = torch.randint(1408, (2, 64), generator=numbers)
            share = torch.rand(64, 1, generator=numbers)
            mixed = (share * images[first] + (1 - share) * images[second]).to(ctx.device)
            return mixed, teacher(mixed).softmax(-1)

        student = fx.wrap(mlp(24), ctx, PLAN, optimizer=adam)
        fns = fx.StepFns(model=student, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
        for batch in fx.shard(taught, ctx, PLAN, batch_size=64).updates(300):
            fx.step(ctx, batch, fns)
        held_out = fx.shard(DataLoader(test, batch_size=64), ctx, PLAN)
        scores = {
            name: float(fx.evaluate(ctx, model, held_out, accuracy))
            for name, model in (("teacher", teacher), ("student", student))
        }
        ops.say(json.dumps({"ranks": ctx.world_size, **scores}), ctx)


if __name__ == "__main__":
    main()
