"""Rows that do not count reach nothing: no gradient, flag, metric or buffer, whatever they hold."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.testing.training import on_mesh
from property_tests.conftest import NO_SHRINK
from tests._slow import slow_after
from tests.cluster._models import PIPELINES

STRATEGIES = (
    fx.DDP(),
    fx.DDP(shard_optimizer=True),
    fx.FSDP(),
    fx.FSDP(mode="grads_and_optimizer"),
)


class _Inverse(nn.Module):
    """Makes infinity of zeros and NaN of infinity, and keeps what it has seen."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 1)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        if self.training:
            self.seen += x.detach().sum(0)
        return self.second(self.first(x.reciprocal())).sum(1)


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _Inverse()


def _sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.5)


def _batches(ctx, plan, parts, via):
    """Through `fx.batch`, parts of each rank; through a loader, two rows of each."""
    data = ctx.axis("data")
    if via == "sharded":
        mine = torch.cat([part[data.rank] for part in parts])
        yield from fx.shard(DataLoader(mine, batch_size=2), ctx, plan)
    elif via == "uneven":
        rows = torch.cat([rows for part in parts for rows in part])
        yield from fx.shard(DataLoader(rows, batch_size=2), ctx, plan)
    else:
        position = None
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            batch = fx.batch(part[data.rank], ctx, plan, after=position, last=last)
            position = batch.position
            yield batch


def _train(ctx, plan, parts, via, weighted, mesh=None):
    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(_net(), placed, plan, optimizer=_sgd)
        rank, mean, metric, steps = placed.axis("data").rank, fx.Mean(), fx.Mean(), []

        def loss(model, batch):
            each = model(batch.data).square()
            found = fx.Weighted(each.sum(), len(each)) if weighted else each.mean()
            return found, {"largest": each.max()}

        fns = fx.StepFns(model, loss)
        for batch in _batches(placed, plan, parts, via):
            report = fx.step(placed, batch, fns)
            mean = mean.update(report)
            metric = metric.update(report.aux["largest"], report.weight)
            real = batch.data[: batch.rows[rank]].clone()
            steps.append((real, batch.position.micro, report.applied, report.skipped))
        means = mean.reduce(placed), metric.reduce(placed)
        whole = fx.unwrap(model)
        values = [p.detach().clone() for p in whole.parameters()]
        return rank, steps, means, values, whole.seen.clone()


def _by_hand(ranks):
    """One process, on the rows that the ranks had: parameters, and which updates were applied."""
    net, window, applied = _net(), [], []
    optimizer = _sgd(net.parameters())
    for steps in zip(*ranks, strict=True):
        window += [rows for rows, *_ in steps]
        if steps[0][1]:
            continue
        net(torch.cat(window)).square().mean().backward()
        applied.append(all(p.grad.isfinite().all() for p in net.parameters()))
        if applied[-1]:
            optimizer.step()
        optimizer.zero_grad()
        window = []
    return [p.detach() for p in net.parameters()], applied


def _check(results):
    ranks = {rank: steps for rank, steps, *_ in results}
    values, applied = _by_hand([ranks[rank] for rank in sorted(ranks)])
    bad = any((rows == 0).any() for steps in ranks.values() for rows, *_ in steps)
    for rank, steps, means, found, seen in results:
        assert [done for _, micro, done, _ in steps if not micro] == applied
        assert [skipped for _, micro, _, skipped in steps if not micro] == [not a for a in applied]
        torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-5)
        assert bad or torch.tensor(means).isfinite().all()
        if rank == 0:
            torch.testing.assert_close(seen, _seen(steps))


def _seen(steps):
    """What the first rank has seen in windows whose update was applied, or that are open."""
    total, window = torch.zeros(2), torch.zeros(2)
    for rows, micro, _, skipped in steps:
        window = window + rows.sum(0)
        if not micro:
            total, window = total + (0 if skipped else window), torch.zeros(2)
    return total + window


@st.composite
def _parts(draw):
    """Rows of each rank, batch by batch: none on some, zeros now and then."""
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        sizes = draw(st.tuples(*[st.integers(0, 2)] * 2).filter(any))
        rows = [[draw(st.integers(0, 3)), draw(st.integers(1, 4))] for _ in range(4)]
        table = iter(torch.tensor(rows).float().split(1))
        empty = torch.empty(0, 2)
        parts.append([torch.cat([empty, *(next(table) for _ in range(size))]) for size in sizes])
    return parts


def _tensor(*rows):
    return torch.tensor(rows).float().reshape(-1, 2)


PARTS = [[_tensor([1, 2]), _tensor([0, 1], [2, 1])], [_tensor([3, 1], [1, 1]), _tensor()]]


@settings(max_examples=7, phases=NO_SHRINK)
@example(PARTS, fx.DDP(), 1, "uneven", False)
@example(PARTS, fx.FSDP(), 2, "batch", True)
@given(
    _parts(),
    st.sampled_from(STRATEGIES),
    st.integers(1, 2),
    st.sampled_from(("uneven", "sharded", "batch")),
    st.booleans(),
)
def test_a_run_is_that_of_the_rows_that_count(clusters, parts, strategy, accumulate, via, weighted):
    if via == "sharded" and not all(sum(len(part[rank]) for part in parts) for rank in (0, 1)):
        via = "batch"  # a loader without rows has nothing to repeat
    plan = fx.Plan(
        strategy=strategy,
        accumulate=accumulate,
        nonfinite="skip",
        even="uneven",
        data=fx.Data(source="sharded" if via == "sharded" else "shard"),
    )
    _check(clusters[2].run(_train, plan, parts, via, weighted))


@PIPELINES
@pytest.mark.parametrize("stages", slow_after(1, [None, fx.FSDP()]))
def test_stages_of_a_pipeline(clusters, stages):
    strategy = fx.PP(split=("second",), schedule="gpipe", microbatches=1, stages=stages)
    mesh = fx.Mesh(pipeline=2, shard=2) if stages else fx.Mesh(pipeline=2, replicate=2)
    plan = fx.Plan(strategy=strategy, even="uneven", nonfinite="skip")
    parts = [[_tensor(), _tensor([2, 1])], *PARTS]
    _check(clusters[4].run(_train, plan, parts, "batch", False, mesh))
