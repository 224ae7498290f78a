"""One replica of a run: prints a line for each update, and ends after the last one.

    replicas.py LIGHTHOUSE COUNT UPDATES SECONDS STRATEGY [FOLDER [EVERY]]

SECONDS is what an update takes at least. With EVERY, replicas train independently and are averaged
every so many updates.
"""

import hashlib
import json
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))


def digest(model):
    """Of all parameters; the ranks of the replica call it together."""
    whole = [tensor.numpy().tobytes() for _, tensor in fx.weights(model)]
    return hashlib.sha256(b"".join(whole)).hexdigest()


def main(lighthouse, count, updates, seconds, strategy, folder=None, every=None):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16 * 1000, 16, generator=generator)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    plan = fx.Plan(strategy=strategy, clip_norm=1.0, seed=3)
    with fx.detect(timeout_s=20 * PATIENCE) as ctx:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3))

        def loss(model, batch):
            time.sleep(float(seconds))  # so that a replica that is stopped is mostly in an update
            return F.mse_loss(model(batch[0]), batch[1])

        fns = fx.StepFns(model=model, loss=loss)
        rows = fx.shard(data, ctx, plan)
        local = None if every is None else fx.DiLoCo(every=int(every), compress="int8")
        team = fx.replicas.Replicas(
            count=int(count),
            lighthouse=lighthouse,
            timeout_s=20 * PATIENCE,
            heartbeat_s=PATIENCE,
            local=local,
        )
        print(json.dumps({"up": time.time(), "pid": os.getpid(), "rank": ctx.rank}), flush=True)
        for update in fx.replicas.train(
            ctx, fns, rows, team, updates=int(updates), folder=folder, save_every=10
        ):
            line = {
                "time": time.time(),
                "update": update.updates,
                "live": update.live,
                "attempts": update.attempts,
                "healed": update.healed,
                "averaged": update.averaged,
                "lost": update.lost,
                "samples": update.position.samples,
                "digest": digest(model),
            }
            if ctx.is_main:
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
