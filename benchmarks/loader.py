"""One process: what a sharded loader costs per batch, and finding a place in a long epoch.

python -m benchmarks.loader
"""

import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from benchmarks._common import interleaved, show


def main():
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(6400, 16), torch.zeros(6400))
    ctx = fx.detect({}, device="cpu")
    loader = DataLoader(data, batch_size=32, shuffle=True)
    sharded = fx.shard(loader, ctx)
    epochs = sharded.epochs(1 << 30)
    runs = {
        "torch DataLoader": lambda: sum(1 for _ in loader),
        "fx.shard": lambda: sum(1 for _ in next(epochs)),
    }
    times = {name: taken / 200 for name, taken in interleaved(runs, rounds=15, each=1).items()}
    rows = [
        [name, f"{1e6 * taken:.1f}", f"{1e6 * (taken - times['torch DataLoader']):.1f}"]
        for name, taken in times.items()
    ]
    show("Loading a batch of 32 rows, shuffled", ["loader", "µs per batch", "µs added"], rows)

    huge = fx.shard(DataLoader(range(10**9), batch_size=32, shuffle=True), ctx)
    rows = []
    for index in (0, 32 * 10**4, 32 * 10**7):
        started = time.perf_counter()
        next(iter(huge.at(fx.Position(index=index))))
        rows.append([f"{index:,}", f"{1e3 * (time.perf_counter() - started):.2f}"])
    show("First batch from a cursor, 10^9 shuffled rows", ["index", "ms"], rows)


if __name__ == "__main__":
    main()
