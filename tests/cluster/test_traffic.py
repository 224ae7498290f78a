"""How many collectives a call makes, counted at torch's own functions."""

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops


@contextmanager
def _counted(counts):
    names = ("all_gather", "all_reduce", "broadcast", "isend", "recv")
    real = {name: getattr(dist, name) for name in names}

    def counting(name):
        def call(*args, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return real[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name in names:
            setattr(dist, name, real[name])


def _count(ctx, fn_name, size):
    kinds = (torch.float32, torch.int64, torch.bool, torch.bfloat16)
    tree = {f"{k}{i}": torch.ones(size).to(k) for k in kinds for i in range(4)}
    calls = {
        "gather": lambda: ops.gather(tree, ctx),
        "reduce": lambda: ops.reduce(tree, ctx, op="max"),
        "broadcast": lambda: ops.broadcast(tree, ctx),
        "any_rank": lambda: ops.any_rank(False, ctx),
        "barrier": lambda: ops.barrier(ctx),
    }
    with _counted({}) as counts:
        calls[fn_name]()
    return counts


def test_small_trees_of_any_dtypes_take_one_collective(pair):
    for name in ("gather", "reduce", "broadcast", "any_rank", "barrier"):
        assert pair.run(_count, name, 8) == [{"all_gather": 1}] * 2


def test_large_trees_take_the_check_and_one_collective_per_dtype_at_most(pair):
    assert pair.run(_count, "gather", 9000) == [{"all_gather": 2}] * 2
    assert pair.run(_count, "broadcast", 9000) == [{"all_gather": 1, "broadcast": 1}] * 2
    assert pair.run(_count, "reduce", 9000) == [{"all_gather": 1, "all_reduce": 4}] * 2


def test_one_rank_talks_to_nobody(clusters):
    for name in ("gather", "reduce", "broadcast", "any_rank", "barrier"):
        assert clusters[1].run(_count, name, 9000) == [{}]


def _step_counts(ctx, weighted, accumulate):
    x = torch.randn(16, 4)
    plan = fx.Plan(accumulate=accumulate, clip_norm=1.0)
    model = fx.wrap(
        nn.Linear(4, 2), ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )

    def loss(model, batch):
        total = F.mse_loss(model(batch[0]), batch[0][:, :2], reduction="sum")
        return fx.Weighted(total, batch[0].numel()) if weighted else total / batch[0].numel()

    fns = fx.StepFns(model=model, loss=loss)
    (epoch,) = fx.shard(DataLoader(TensorDataset(x), batch_size=2), ctx, plan).epochs(1)
    counts = []
    for batch in epoch:
        with _counted({}) as found:
            fx.step(ctx, batch, fns)
        counts.append(found)
    return counts


def test_a_step_hides_no_collective(pair):
    for counts in pair.run(_step_counts, False, 2):
        assert counts == [{}] * 4
    for counts in pair.run(_step_counts, True, 1):
        assert counts == [{"all_gather": 1}] * 4
    for counts in pair.run(_step_counts, True, 2):
        assert counts == [{"all_gather": 1}] * 4
