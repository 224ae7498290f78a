"""What the benchmarks of one GPU share: the device, timings, their table, a loop by hand."""

import json
import os
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from benchmarks._common import show

RESULTS = Path("gpu.json")
DEVICE = os.environ.get("FXTRAIN_GPU_TESTS_ON") or "cuda"
SMALL = DEVICE != "cuda"
ROWS, LENGTH = (2, 16) if SMALL else (16, 1024)


def synchronize():
    if DEVICE != "cpu":
        torch.accelerator.synchronize()


def detect():
    return fx.detect({}, device=DEVICE)


def timed(runs, *, rounds, each):
    """Median seconds a call; runs take turns, and each waits for the device at its end."""
    rounds, each = (1, 1) if SMALL else (rounds, each)
    times = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(5):
            run()
    for _ in range(rounds):
        for name, run in runs.items():
            synchronize()
            started = time.perf_counter()
            for _ in range(each):
                run()
            synchronize()
            times[name].append((time.perf_counter() - started) / each)
    return {name: statistics.median(taken) for name, taken in times.items()}


def report(part, title, times):
    """Print times against the first, and keep them."""
    first = next(iter(times.values()))
    rows = [[name, f"{1e6 * t:.0f}", f"{first / t:.3f}"] for name, t in times.items()]
    show(title, ["loop", "µs", "speed of the first"], rows)
    if SMALL:
        return
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[part] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **times}
    RESULTS.write_text(json.dumps(known, indent=1))


def adam(params):
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


def loop_by_hand(model, tokens):
    """A step in bf16 with clipping, on torch alone."""
    optimizer = adam(model.parameters())

    def run():
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def loop_by_plan(ctx, net, plan, tokens):
    """The same under a plan."""
    model = fx.wrap(net, ctx, plan, optimizer=adam)
    batch = next(iter(fx.shard(DataLoader(tokens, batch_size=len(tokens)), ctx, plan)))
    fns = fx.StepFns(model=model, loss=lambda m, b: m(b.data, labels=b.data).loss)
    return lambda: fx.step(ctx, batch, fns)
