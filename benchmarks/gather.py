"""Two ranks: gathering a tree of 16 leaves, and what the check of a call costs.

python -m benchmarks.gather
"""

import statistics
import time
import warnings

import torch
from torch import distributed as dist

import fxtrain as fx
from benchmarks._common import show
from fxtrain import ops


def _tree():
    return {f"leaf{i}": torch.randn(8, 4) for i in range(16)}


def _median(runs, rounds=40, warm=2, each=8):
    """Medians over rounds in which each has its turn, after calls that bear what came before."""
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            for _ in range(warm):
                run()
            dist.barrier()
            started = time.perf_counter()
            for _ in range(each):
                run()
            times[name].append((time.perf_counter() - started) / each)
    return {name: statistics.median(taken) for name, taken in times.items()}


def _leaf_by_leaf(tree):
    out = {}
    for name, leaf in tree.items():
        rows = [torch.empty_like(leaf) for _ in range(2)]
        dist.all_gather(rows, leaf)
        out[name] = torch.cat(rows)
    return out


def _fused(tree):
    flat = torch.cat([leaf.view(-1) for leaf in tree.values()])
    rows = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(rows, flat)
    return rows


def measure():
    """Medians on rank 0, in seconds per gather."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with fx.detect(device="cpu") as ctx:
        import attrs
        from accelerate import Accelerator

        unchecked = attrs.evolve(ctx, comm=attrs.evolve(ctx.comm, checks=False))
        accelerator = Accelerator(cpu=True)
        tree, large = _tree(), {f"leaf{i}": torch.randn(64, 64) for i in range(16)}
        runs = {
            "one fused torch collective": lambda: _fused(tree),
            "torch, leaf by leaf": lambda: _leaf_by_leaf(tree),
            "Accelerate": lambda: accelerator.gather(tree),
            "fxtrain": lambda: ops.gather(tree, ctx),
            "fxtrain, checks off": lambda: ops.gather(tree, unchecked),
            "256 KiB: one fused torch collective": lambda: _fused(large),
            "256 KiB: Accelerate": lambda: accelerator.gather(large),
            "256 KiB: fxtrain": lambda: ops.gather(large, ctx),
            "256 KiB: fxtrain, checks off": lambda: ops.gather(large, unchecked),
        }
        return _median(runs)


def main():
    times, _ = fx.launch(measure, ranks=2)
    rows = []
    for name, taken in times.items():
        peer = times["256 KiB: Accelerate" if name.startswith("256") else "Accelerate"]
        rows.append([name, f"{1e3 * taken:.2f}", f"{peer / taken:.1f}x"])
    show("Gather of 16 leaves, two ranks, gloo", ["how", "ms", "faster than Accelerate"], rows)


if __name__ == "__main__":
    main()
