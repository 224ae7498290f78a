"""Rank 1 is told to leave while it trains on update 5; both leave after it."""

import json
import os
import signal
import sys

import torch
from torch.utils.data import DataLoader

import fxtrain as fx


def main():
    with fx.detect() as ctx, fx.ops.preemption(ctx) as notice:
        plan = fx.Plan(accumulate=2)
        model = fx.wrap(
            torch.nn.Linear(2, 1), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        )
        loader = fx.shard(DataLoader(torch.ones(400, 2), batch_size=2), ctx, plan)
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
        for batch in loader:
            if ctx.rank == 1 and (batch.position.updates, batch.position.micro) == (4, 1):
                os.kill(os.getpid(), signal.SIGUSR1)
            report = fx.step(ctx, batch, fns)
            if notice.due(report.position):
                break
        fx.save(sys.argv[1], ctx, model, position=report.position)
        print(json.dumps({"rank": ctx.rank, "left_at": report.position.updates}))


if __name__ == "__main__":
    main()
