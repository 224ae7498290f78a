"""What ranks that the launcher starts on a device do: `program.py NAME DEVICE ARGUMENTS`."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx


def _parts(ctx, plan):
    torch.manual_seed(1)
    rows = torch.randn(64, 8)
    model = fx.wrap(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)),
        ctx,
        plan,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
    )
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    return fx.shard(DataLoader(rows, batch_size=4, shuffle=True), ctx, plan), fns


def _say(ctx, told):
    if ctx.is_main:
        print(json.dumps(told), flush=True)  # noqa: T201


def killed(device, folder, signals):
    """Train; in the first attempt, rank 0 is killed after five updates."""
    with fx.detect(device=device, timeout_s=30) as ctx:
        loader, fns = _parts(ctx, fx.Plan(seed=3))
        position = None
        if Path(folder, "checkpoints").exists():
            position = fx.restore(fx.latest(f"{folder}/checkpoints"), ctx, fns.model).position
        losses = []
        for batch in loader.at(position) if position else loader:
            report = fx.step(ctx, batch, fns)
            losses.append(float(report.loss))
            if batch.position.updates == 5 and signals == "yes" and position is None:
                fx.save(f"{folder}/checkpoints", ctx, fns.model, position=report.position)
                if ctx.is_main:
                    os.kill(os.getpid(), signal.SIGKILL)
        _say(ctx, {"losses": losses, "device": ctx.device.type, "resumed": position is not None})


def absent(device):
    """The last rank never joins the update of the others."""
    with fx.detect(device=device, timeout_s=8) as ctx:
        loader, fns = _parts(ctx, fx.Plan(strategy=fx.DDP()))
        for number, batch in enumerate(loader):
            if number == 2 and ctx.is_last:
                time.sleep(60)
            fx.step(ctx, batch, fns)


def bound(device):
    """The cores that a rank may use, after it has used its device."""
    with fx.detect(device=device, timeout_s=30) as ctx:
        total = float(torch.ones(8, device=ctx.device).sum())
        _say(ctx, {"cores": sorted(os.sched_getaffinity(0)), "total": total})


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    {"killed": killed, "absent": absent, "bound": bound}[name](*words)
