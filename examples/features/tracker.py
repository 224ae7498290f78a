"""A tracker of your own: a table in SQLite, beside the tracker of fxtrain.

    python examples/features/tracker.py
    fxtrain launch --ranks 2 examples/features/tracker.py

A tracker is a record of functions. They run in a thread of their own, on rank 0 only, and a failure
of theirs never stops training. Ends with one JSON line: the entries in the table, the last loss,
and whether the JSON lines tracker has the same curve.
"""

import json
import sqlite3
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops
from fxtrain.trackers import Entry, Start, Tracker, read_run


def begin(config: object, start: Start) -> sqlite3.Connection:
    """Open the table in the folder of the run."""
    base = sqlite3.connect(start.folder / "run.sqlite", check_same_thread=False)
    base.execute("create table if not exists entries (step integer, name text, value real)")
    return base


def write(base: sqlite3.Connection, entry: Entry) -> None:
    rows = [(entry.step, name, value) for name, value in entry.value.items()]
    base.executemany("insert into entries values (?, ?, ?)", rows)


def end(base: sqlite3.Connection, failed: object) -> None:
    base.commit()
    base.close()


SQLITE = Tracker(
    name="SQLite",
    kinds=("log",),
    open=begin,
    write=write,
    flush=lambda base: base.commit(),
    close=end,
)


def main(ctx: fx.DistContext) -> dict[str, float | bool]:
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x[:1792]).float() / 16, torch.tensor(y[:1792]))
    plan = fx.Plan(batch="global", seed=6)
    torch.manual_seed(0)
    net = torch.nn.Linear(64, 10)
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.Adam(params, lr=1e-2))
    fns = fx.StepFns(model=model, loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    loader = fx.shard(DataLoader(data, batch_size=64, shuffle=True), ctx, plan)
    with tempfile.TemporaryDirectory() as own:
        folder = ops.broadcast_object(own, ctx)
        with fx.track(folder, ctx, [fx.JsonLines(), SQLITE], plan=plan) as run:
            for batch in loader:
                report = fx.step(ctx, batch, fns)
                run.log({"loss": ops.reduce(report.loss, ctx)}, report.position)
        told: dict[str, float | bool] = {}
        if ctx.is_main:
            base = sqlite3.connect(Path(folder) / "run.sqlite")
            rows = base.execute("select step, value from entries where name = 'loss'").fetchall()
            base.close()
            same = rows == read_run(folder).curve("loss")
            told = {"entries": len(rows), "loss": rows[-1][1], "same": same}
        return ops.broadcast_object(told, ctx)


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
