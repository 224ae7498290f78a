"""Two ranks: a DDP step beside the same step written by hand, with and without checks.

python -m benchmarks.ddp
"""

import statistics
import time
import warnings

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from benchmarks._common import by_hand, show


def _net():
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256), nn.ReLU()] * 1
    return nn.Sequential(nn.Linear(64, 256), *layers, nn.Linear(256, 256), nn.Linear(256, 10))


def _adam(params):
    return torch.optim.AdamW(params, lr=1e-3)


def _by_hand(x, y):
    model = DistributedDataParallel(_net(), gradient_as_bucket_view=True)
    return by_hand(model, _adam(model.parameters()), x, y)


def _weighted_by_hand(x, y, group=None):
    """As above, with the mean over all ranks' rows: one exchange of the counts per step.

    Without a group, in that of the gradients, where a rank that leaves one out mixes the two.
    """
    model = DistributedDataParallel(_net(), gradient_as_bucket_view=True)
    optimizer = _adam(model.parameters())

    def run():
        weight = torch.tensor(float(len(x)))
        dist.all_reduce(weight, group=group)
        total = F.cross_entropy(model(x), y, reduction="sum")
        (total * dist.get_world_size() / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return run


def _ours(ctx, x, y, *, weighted):
    plan = fx.Plan(clip_norm=1.0)
    model = fx.wrap(_net(), ctx, plan, optimizer=_adam)
    data = TensorDataset(x.repeat(2, 1), y.repeat(2))
    batch = next(iter(fx.shard(DataLoader(data, batch_size=len(x)), ctx, plan)))

    def mean(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def total(model, batch):
        return fx.Weighted(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(x))

    fns = fx.StepFns(model=model, loss=total if weighted else mean)
    return lambda: fx.step(ctx, batch, fns)


def measure():
    """Medians on rank 0, in seconds per step."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with fx.detect(device="cpu") as ctx, fx.detect(device="cpu", checks=False) as unchecked:
        x, y = torch.randn(256, 64), torch.randint(0, 10, (256,))
        runs = {
            "torch by hand": _by_hand(x, y),
            "torch by hand, weighted": _weighted_by_hand(x, y),
            "torch by hand, weighted in a group of its own": _weighted_by_hand(
                x, y, dist.new_group(backend="gloo")
            ),
            "fxtrain": _ours(ctx, x, y, weighted=False),
            "fxtrain, Weighted": _ours(ctx, x, y, weighted=True),
            "fxtrain, Weighted, checks off": _ours(unchecked, x, y, weighted=True),
        }
        times = {name: [] for name in runs}
        for round_number in range(80):
            for name, run in runs.items():
                dist.barrier()
                started = time.perf_counter()
                for _ in range(5):
                    run()
                if round_number >= 10:
                    times[name].append((time.perf_counter() - started) / 5)
        return {name: statistics.median(taken) for name, taken in times.items()}


def main():
    times, _ = fx.launch(measure, ranks=2)
    rows = []
    for name, seconds in times.items():
        weighted = [times[base] / seconds for base in times if base.startswith("torch by hand, w")]
        alike = weighted if "eighted" in name else [times["torch by hand"] / seconds]
        rows.append([name, f"{1e3 * seconds:.2f}", ", ".join(f"{each:.3f}" for each in alike)])
    show("A DDP step, two ranks, gloo", ["how", "ms", "speed against the same by hand"], rows)


if __name__ == "__main__":
    main()
