"""Trains with fx.fit; a fault changes parameters at update 6 as broken hardware or a bug would.

python replayed.py FOLDER none|hardware|bug
"""

import os
import sys

import torch
from torch.utils.data import DataLoader

import fxtrain as fx


def main(ctx, folder, fault):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    plan = fx.Plan(verify_replicas=8)
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    loader = fx.shard(DataLoader(rows, batch_size=2, shuffle=True), ctx, plan)
    fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
    for report in fx.fit(ctx, fns, loader, folder, updates=12, save_every=4, show=False):
        if report.updates != 6 or ctx.rank != ctx.world_size - 1:
            continue
        if fault == "hardware":
            model.module[0].weight.data[0, 0] = int.from_bytes(os.urandom(4), "little") / 2**32
        elif fault == "bug":
            model.module[0].weight.data[0, 0] += 1


if __name__ == "__main__":
    with fx.detect(device="cpu") as ctx:
        main(ctx, *sys.argv[1:])
