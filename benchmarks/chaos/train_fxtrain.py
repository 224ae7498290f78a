"""The program of the benchmark, with fxtrain: `train_fxtrain.py FOLDER`."""

import sys

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import fxtrain as fx
from benchmarks.chaos import _training as t


def main() -> None:
    plan = fx.Plan(seed=7)
    with fx.detect(device="cpu", timeout_s=t.TIMEOUT_S) as ctx:
        notes = t.Notes(ctx.rank, sys.argv[1])
        model = fx.wrap(
            t.make_model(), ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3)
        )
        loader = fx.shard(DataLoader(t.Rows(), batch_size=t.BATCH, shuffle=True), ctx, plan)
        seen = {}

        def loss(model, batch):
            seen["rows"] = batch["index"][batch.valid].tolist()
            return F.cross_entropy(model(batch["x"]), batch["y"])

        fns = fx.StepFns(model=model, loss=loss)
        for report in fx.fit(
            *(ctx, fns, loader, sys.argv[1]),
            epochs=t.EPOCHS, save_every=t.SAVE_EVERY, keep_last=t.KEPT, show=False,
        ):  # fmt: skip
            notes.update(report.position.updates, seen["rows"], model.module)


main()
