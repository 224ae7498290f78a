"""Metrics over exactly the rows of the data, on any number of ranks.

    python examples/features/metrics.py
    fxtrain launch --ranks 2 examples/features/metrics.py

299 rows do not divide by ranks and batches. `fx.evaluate` counts each once: means by name, and a
score that is no mean over rows, here scikit-learn's F1, from an object with `update` and `compute`
(those of torchmetrics and of Hugging Face evaluate work as they are). Ends with one JSON line of
the metrics, and whether a loop with `ops.gather_valid` finds the same predictions.
"""

import json
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops


class F1:
    """Macro F1 of all rows that `update` was given."""

    def __init__(self) -> None:
        self.guesses: list[Tensor] = []
        self.labels: list[Tensor] = []

    def update(self, guesses: Tensor, labels: Tensor) -> None:
        self.guesses.append(guesses)
        self.labels.append(labels)

    def compute(self) -> float:
        guesses, labels = torch.cat(self.guesses).cpu(), torch.cat(self.labels).cpu()
        return float(f1_score(labels, guesses, average="macro"))


def measures(model: fx.Wrapped, batch: fx.Batch) -> dict[str, Any]:
    """Values per row, and the arguments of the object with the same name."""
    logits = model(batch[0])
    guesses = logits.argmax(1)
    return {
        "loss": F.cross_entropy(logits, batch[1], reduction="none"),
        "accuracy": guesses == batch[1],
        "f1": (guesses, batch[1]),
    }


def main(ctx: fx.DistContext) -> dict[str, float | bool]:
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x) / 16, torch.tensor(y)
    train, test = TensorDataset(x[325:], y[325:]), TensorDataset(x[:299], y[:299])
    plan = fx.Plan(batch="global", seed=1)
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10, dtype=torch.float64)
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    for batch in fx.shard(DataLoader(train, batch_size=32, shuffle=True), ctx, plan):
        fx.step(ctx, batch, fns)

    tests = DataLoader(test, batch_size=64)
    found = fx.evaluate(ctx, model, tests, measures, metrics={"f1": F1()})

    with torch.no_grad():
        gathered = [
            ops.gather_valid(model(batch[0]).argmax(1), batch, ctx)
            for batch in fx.shard(tests, ctx, plan)
        ]
    guesses = torch.cat(gathered).cpu()
    same = len(guesses) == 299 and f1_score(y[:299], guesses, average="macro") == found["f1"]
    return {**found, "same": bool(same)}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
