"""datasets: a map-style dataset and a stream, each row once on any number of ranks.

    fxtrain launch --ranks 2 examples/recipes/datasets_rows.py

`fx.shard` takes their DataLoader as it is; do not call `split_dataset_by_node`. Ends with one JSON
line: the loss after training from each, and whether all rows of both were seen once.
"""

import json
from typing import Any

import torch
import torch.nn.functional as F
from datasets import Dataset
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops


def train(ctx: fx.DistContext, dataset: Any, *, shuffle: bool) -> tuple[float, bool]:
    """Two epochs; the loss, and whether the numbers of the rows are those of the dataset."""
    plan = fx.Plan(batch="global", seed=1)
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10)
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
    fns = fx.StepFns(
        model=model,
        loss=lambda model, batch: F.cross_entropy(model(batch["pixels"]), batch["label"]),
    )
    seen = []
    loader = DataLoader(dataset, batch_size=32, shuffle=shuffle)
    for epoch in fx.shard(loader, ctx, plan).epochs(2):
        for batch in epoch:
            fx.step(ctx, batch, fns)
            seen += ops.gather_valid(batch["number"], batch, ctx).tolist()
    once = sorted(seen) == sorted([*range(192)] * 2)
    return fx.evaluate(ctx, model, DataLoader(dataset, batch_size=64), fns.loss), once


def main(ctx: fx.DistContext) -> dict[str, float | bool]:
    x, y = load_digits(return_X_y=True)
    columns = {"pixels": (x[:192] / 16).astype("float32"), "label": y[:192], "number": range(192)}
    rows = Dataset.from_dict(columns).with_format("torch")
    mapped, first = train(ctx, rows, shuffle=True)
    stream, second = train(ctx, rows.to_iterable_dataset(num_shards=4), shuffle=False)
    return {"mapped": mapped, "stream": stream, "once": first and second}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
