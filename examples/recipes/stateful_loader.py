"""torchdata: a StatefulDataLoader, whose state is replaced by the position of a run.

    fxtrain launch --ranks 2 examples/recipes/stateful_loader.py

`fx.shard` reads it as a plain DataLoader. `loader.at(position)` continues with the next row at any
world size and number of workers, and `fx.save` stores the position. Ends with one JSON line:
whether the rows after a stop in the middle of the second epoch are those of a run without one.
"""

import json

import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import fxtrain as fx
from fxtrain import ops


def loader(ctx: fx.DistContext, workers: int = 0) -> fx.Sharded:
    """60 rows in batches of 6 of all ranks, shuffled."""
    data = TensorDataset(torch.arange(60))
    rows = StatefulDataLoader(data, batch_size=6, shuffle=True, num_workers=workers)
    return fx.shard(rows, ctx, fx.Plan(batch="global", seed=2))


def main(ctx: fx.DistContext) -> dict[str, int | bool]:
    def rows(start: fx.Sharded) -> list[tuple[fx.Position, list[int]]]:
        """Three epochs, from the loader's position on."""
        return [
            (batch.position, ops.gather_valid(batch[0], batch, ctx).tolist())
            for epoch in start.epochs(3)
            for batch in epoch
        ]

    whole = rows(loader(ctx))
    stopped, _ = whole[13]
    rest = rows(loader(ctx, workers=1).at(stopped))
    return {"batches": len(whole), "left": len(rest), "same": rest == whole[14:]}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
