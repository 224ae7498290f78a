"""webdataset: tar files as a stream, read by every rank or each file by one rank.

    fxtrain launch --ranks 2 examples/recipes/webdataset_stream.py

By default, a WebDataset refuses to run on several ranks. Pass a `nodesplitter`: one that keeps all
files lets fxtrain split the rows, in the order of one process, and every rank reads every file.
Under `Data(source="sharded")`, `split_by_node` lets each rank read its own files only. Ends with
one JSON line: whether each way has seen every row once in each epoch.
"""

import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import webdataset
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops

FILES, ROWS = 4, 10


def write(folder: str) -> list[str]:
    """Four tar files of ten rows each."""
    paths = [str(Path(folder) / f"rows-{number}.tar") for number in range(FILES)]
    for number, path in enumerate(paths):
        with tarfile.open(path, "w") as file:
            for row in range(number * ROWS, (number + 1) * ROWS):
                content = str(row).encode()
                entry = tarfile.TarInfo(f"{row:04d}.cls")
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
    return paths


def seen(ctx: fx.DistContext, dataset: Any, plan: fx.Plan) -> list[list[int]]:
    """The rows of two epochs, over all ranks."""
    loader = DataLoader(dataset.decode().to_tuple("cls"), batch_size=4)
    return [
        sorted(row for batch in epoch for row in ops.gather_valid(batch[0], batch, ctx).tolist())
        for epoch in fx.shard(loader, ctx, plan).epochs(2)
    ]


def main(ctx: fx.DistContext) -> dict[str, bool]:
    with tempfile.TemporaryDirectory() as own:
        folder = ops.broadcast_object(own, ctx)
        paths = ops.broadcast_object(write(folder) if ctx.is_main else None, ctx)
        form = {"shardshuffle": False, "empty_check": False}
        rows = webdataset.WebDataset(paths, nodesplitter=lambda files: files, **form)
        files = webdataset.WebDataset(paths, nodesplitter=webdataset.split_by_node, **form)
        shared = seen(ctx, rows, fx.Plan())
        split = seen(ctx, files, fx.Plan(data=fx.Data(source="sharded")))
        ops.barrier(ctx)
    every = [list(range(FILES * ROWS))] * 2
    return {"rows": shared == every, "files": split == every}


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
