"""Trains with fx.fit inside fx.ops.restarting; one rank fails once, in one of several ways.

python restarting.py FOLDER none|raise|stuck|late|killed|always
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import fxtrain as fx

FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2]
TIMEOUT_S = 5.0 * float(os.environ.get("TEST_PATIENCE", "1"))
CALLS = []


def fails(ctx, updates):
    """What happens after an update of the first call of `main`."""
    last = ctx.rank == ctx.world_size - 1
    first = len(CALLS) == 1 and not (FOLDER / "killed").exists()
    if FAULT == "always" and updates >= 6 and last:  # a run that stops at 6 is saved there
        raise OSError("a disk that failed once")
    if updates != 6 or not first:
        return
    if FAULT == "raise" and last:
        raise OSError("a disk that failed once")
    if FAULT == "stuck" and last:
        time.sleep(600)  # until it is interrupted; the others time out
    if FAULT == "late":  # the other rank fails meanwhile
        if last:
            time.sleep(600)
        raise OSError("a disk that failed once")
    if FAULT == "killed" and last:
        (FOLDER / "killed").touch()
        os._exit(9)


def main(ctx):
    CALLS.append(time.time())
    fx.ops.seed(3, ctx, per_rank=True)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    model = fx.wrap(net, ctx, fx.Plan(), optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
    rows = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    loader = fx.shard(DataLoader(rows, batch_size=2, shuffle=True), ctx)
    fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
    for report in fx.fit(
        ctx, fns, loader, FOLDER / "run", updates=12, save_every=4, show=False, signals=()
    ):
        fails(ctx, report.updates)
    values = b"".join(one.detach().numpy().tobytes() for one in model.module.parameters())
    return hashlib.sha256(values).hexdigest()


if __name__ == "__main__":
    digest = fx.ops.restarting(main, restarts=1, device="cpu", timeout_s=TIMEOUT_S)
    line = {"rank": int(os.environ["RANK"]), "digest": digest, "calls": len(CALLS)}
    print(json.dumps({**line, "again_s": CALLS[-1] - CALLS[0]}), flush=True)
