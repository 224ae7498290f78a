"""What ranks that the launcher starts on a device do: `program.py NAME DEVICE ARGUMENTS`."""

import importlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from tests._patience import patience


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


def restarted(device):
    """The last rank fails once, while the others wait for the results of an update."""
    timeout_s, began, losses_of_calls = 20.0 * patience(), [], []

    def main(ctx):
        began.append(time.monotonic())
        plan = fx.Plan(strategy=fx.DDP(), seed=3)
        loader, fns = _parts(ctx, plan)
        losses_of_calls.append(losses := [])
        for number, batch in enumerate(loader):
            if number == 2 and ctx.is_last and len(began) == 1:
                raise OSError("a disk that failed once")
            losses.append(float(fx.step(ctx, batch, fns).loss))
            for parameter in fns.model.module.parameters():
                float(parameter.detach().sum())
            if number == 3:
                seconds = (began[-1] - began[0]) / timeout_s
                return _say(ctx, {"losses": losses_of_calls, "share_of_timeout": seconds})
        return None

    if device == "shadow":
        importlib.import_module("tests.devices.shadow")
        dist.Backend.default_device_backend_map["shadow"] = "ordered"
    fx.ops.restarting(main, device=device, timeout_s=timeout_s)


def existing(device, how):
    """Train in a group that the script opened, on the GPUs in reverse order."""
    if device == "cpu":
        dist.init_process_group("gloo")
        own = torch.device("cpu")
    else:
        own = torch.device("cuda", torch.cuda.device_count() - 1 - int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        dist.init_process_group("nccl", device_id=own if how == "device_id" else None)
    with fx.detect(device="cpu" if device == "cpu" else None, timeout_s=60) as ctx:
        loader, fns = _parts(ctx, fx.Plan(strategy=fx.FSDP(min_params=1), clip_norm=1.0))
        losses = [float(fx.step(ctx, batch, fns).loss) for batch in loader]
        kept = "kept" if ctx.device == own else f"{ctx.device}, not {own}"
        finite = "finite" if all(map(math.isfinite, losses)) else losses
        print(f"the device is {kept}, and the loss is {finite}", flush=True)  # noqa: T201
    dist.destroy_process_group()


def raises(device):
    """The last rank raises in its loss, while the others wait for their results."""
    with fx.detect(device=device, timeout_s=30) as ctx:
        loader, fns = _parts(ctx, fx.Plan(strategy=fx.DDP()))
        for number, batch in enumerate(loader):
            if number == 2 and ctx.is_last:
                raise ValueError("a bad row")
            float(fx.step(ctx, batch, fns).loss)


def bound(device):
    """The cores that a rank may use, after it has used its device."""
    with fx.detect(device=device, timeout_s=30) as ctx:
        total = float(torch.ones(8, device=ctx.device).sum())
        _say(ctx, {"cores": sorted(os.sched_getaffinity(0)), "total": total})


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    functions = (killed, absent, restarted, existing, raises, bound)
    next(each for each in functions if each.__name__ == name)(*words)
