"""Trains, and then rank 1 stops in the way that the command line names, until a file is there."""

import re
import sys
import time
from pathlib import Path

import torch

import fxtrain as fx


def read_rows(rank: int, how: str, until: Path) -> None:
    if rank != 1:
        return
    if how == "lock":
        re.match("(a+)+$", "a" * 40 + "b")  # holds the interpreter's lock, as C code may, for hours
    while not until.exists():
        time.sleep(0.5)  # long beside the line above, at which it may be seen too


def main(how: str, timeout_s: float, until: Path) -> None:
    with fx.detect(timeout_s=timeout_s) as ctx:
        model = fx.wrap(torch.nn.Linear(2, 1), ctx, optimizer=torch.optim.Adam)
        for update in range(6):
            batch = fx.batch(torch.ones(4, 2), ctx, model.plan)
            if update == 3:
                fx.ops.on_main(until.with_name("stuck").touch, ctx)
                read_rows(ctx.rank, how, until)
                if how == "gather":
                    fx.ops.gather(torch.ones(1), ctx)
            fx.update(ctx, batch, model, model(batch.data).mean())
        fx.ops.say("finished", ctx)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]))
