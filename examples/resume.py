"""Train digits in pieces: save and stop at a signal, and resume in the next process.

    python examples/resume.py --folder runs/digits     # until: kill -USR1 PROCESS
    python examples/resume.py --folder runs/digits     # resumes

On a SLURM cluster the signal comes from `#SBATCH --signal=USR1@60`, and the second start from
`--requeue`. `fxtrain verify-resume examples/resume.py` checks that a restart is exact.
Ends with one JSON line from rank 0.
"""

import argparse
import json
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops


def load() -> TensorDataset:
    """All 1797 digits: (64,) pixels and a label each."""
    x, y = load_digits(return_X_y=True)
    return TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))


def loss(model: fx.Wrapped, batch: fx.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross-entropy, and the share of correct guesses."""
    guess = model(batch[0])
    return F.cross_entropy(guess, batch[1]), (guess.argmax(-1) == batch[1]).float().mean()


def start(ctx: fx.DistContext, folder: str) -> tuple[fx.Wrapped, fx.Sharded]:
    """A model and its data, where the latest checkpoint left them."""
    plan = fx.Plan(accumulate=2, clip_norm=1.0, seed=7)
    ops.seed(plan.seed, ctx)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3))
    loader = fx.shard(DataLoader(load(), batch_size=16, shuffle=True), ctx, plan)
    ops.seed(plan.seed, ctx, per_rank=True)  # dropout differs between ranks
    if fx.latest(folder):
        restored = fx.restore(folder, ctx, model)
        ops.say(f"resumed from {restored.path}", ctx)
        loader = loader.at(restored.position)
    return model, loader


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/digits")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--every", type=int, default=40, help="updates between checkpoints")
    options = parser.parse_args()
    with fx.detect() as ctx, fx.ops.preemption(ctx) as notice:
        model, loader = start(ctx, options.folder)
        fns = fx.StepFns(model=model, loss=loss)
        told: dict[str, Any] = {"updates": loader.position.updates, "left": False, "accuracy": None}
        for batch in (batch for epoch in loader.epochs(options.epochs) for batch in epoch):
            report = fx.step(ctx, batch, fns)
            place = report.position
            leave = notice.due(place)
            if leave or (place.micro == 0 and place.updates % options.every == 0):
                fx.save(
                    options.folder, ctx, model, position=place, keep_last=3, background=not leave
                )
            told = {"updates": place.updates, "left": leave, "accuracy": report.aux}
            if leave:
                break
        if told["accuracy"] is not None:
            told["accuracy"] = float(ops.reduce(told["accuracy"], ctx))
        ops.say(json.dumps(told), ctx)


if __name__ == "__main__":
    main()
