"""A rank that ends in its first attempt, once its spare is ready; prints its process.

The file `spares` has the processes that waited to become a rank.

python starts_again.py FOLDER
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import fxtrain as fx

FOLDER = Path(sys.argv[1])
SEEN = {}


def spares():
    """Processes of this launch that wait, and have imported torch and what follows it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            env = (process / "environ").read_bytes()
            words = (process / "cmdline").read_bytes()
            ticks = (process / "stat").read_text().rpartition(")")[2].split()[11]
        except OSError:
            continue
        if b"FXTRAIN_SPARE=1" in env and str(FOLDER).encode() in words:
            # Its time on a processor no longer grows.
            before, looks = SEEN.get(process, ("", 0))
            SEEN[process] = (ticks, looks + 1 if ticks == before else 0)
            if SEEN[process][1] > 15:
                found.append(int(process.name))
    return found


def main():
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with fx.detect(device="cpu") as ctx:
        model = fx.wrap(torch.nn.Linear(2, 1), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
        for batch in fx.shard(DataLoader(torch.ones(2 * ctx.world_size, 2)), ctx):
            fx.step(ctx, batch, fns)
        line = {
            "attempt": attempt,
            "rank": ctx.rank,
            "pid": os.getpid(),
            "args": sys.argv[1:],
            "port": os.environ["MASTER_PORT"],
            "spare": "FXTRAIN_SPARE" in os.environ,
        }
        print(json.dumps(line), flush=True)
        if attempt == 0:
            while len(ready := spares()) < ctx.world_size:
                time.sleep(0.1)
            fx.ops.barrier(ctx)
            if ctx.rank == ctx.world_size - 1:
                (FOLDER / "spares").write_text(json.dumps(ready))
                os._exit(7)
            time.sleep(600)


if __name__ == "__main__":
    main()
