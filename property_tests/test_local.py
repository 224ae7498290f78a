"""Copies that train alone against the same by hand: one net per rank, averaged in one process."""

import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx

EPOCHS = 2


def _rows(n):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, (x.sum(1, keepdim=True) * 2).sin(), torch.arange(n) % 3 + 1.0


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def _inner(params):
    return torch.optim.SGD(params, lr=0.02, momentum=0.5)


def _loss(model, x, y, w, *, weighted):
    """(total, weight) over rows."""
    losses = (model(x) - y).square().squeeze(1)
    return ((losses * w).sum(), w.sum()) if weighted else (losses.sum(), len(losses))


def _train(ctx, n, size, plan, weighted):
    model = fx.wrap(_net(), ctx, plan, optimizer=_inner)
    loader = fx.shard(DataLoader(TensorDataset(*_rows(n)), batch_size=size), ctx, plan)

    def loss(model, batch):
        total, weight = _loss(model, *batch, weighted=weighted)
        return fx.Weighted(total, weight) if weighted else total / weight

    fns = fx.StepFns(model=model, loss=loss)
    reports = [fx.step(ctx, batch, fns) for epoch in loader.epochs(EPOCHS) for batch in epoch]
    assert not any(report.skipped for report in reports)
    return [p.detach().clone() for p in model.parameters()], reports[-1].position.updates


class _ByHand:
    """One net per rank in one process."""

    def __init__(self, ranks, local):
        self.nets = [_net() for _ in range(ranks)]
        self.inner = [_inner(net.parameters()) for net in self.nets]
        self.anchor = [p.detach().clone() for p in self.nets[0].parameters()]
        self.outer = None
        if isinstance(local, fx.DiLoCo):
            options = {"lr": local.outer_lr, "momentum": local.outer_momentum}
            self.outer = torch.optim.SGD(self.anchor, **options, nesterov=local.nesterov)
        self.weights = [0.0] * ranks

    def update(self, rows, *, weighted):
        """Rows are (x, y, w) of each rank."""
        for rank, (net, optimizer) in enumerate(zip(self.nets, self.inner, strict=True)):
            if not len(rows[rank][0]):
                continue
            total, weight = _loss(net, *rows[rank], weighted=weighted)
            (total / weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            self.weights[rank] += float(weight)

    def average(self):
        total = sum(self.weights)
        with torch.no_grad():
            for place, anchor in enumerate(self.anchor):
                parts = [list(net.parameters())[place] for net in self.nets]
                mean = sum(p * w for p, w in zip(parts, self.weights, strict=True)) / total
                if self.outer is None:
                    anchor.copy_(mean)
                else:
                    anchor.grad = anchor - mean
            if self.outer is not None:
                self.outer.step()
            for net in self.nets:
                for parameter, value in zip(net.parameters(), self.anchor, strict=True):
                    parameter.copy_(value)
        self.weights = [0.0] * len(self.nets)


def _by_hand(ranks, n, size, plan, weighted):
    run, updates, local = _ByHand(ranks, plan.local), 0, plan.local
    stride = ranks * size
    table = _rows(n)
    for _ in range(EPOCHS):
        lows = list(range(0, n, stride))
        for first in range(0, len(lows), plan.accumulate):
            window = lows[first : first + plan.accumulate]
            rows = [
                [
                    torch.cat([c[low + r * size : min(low + (r + 1) * size, n)] for low in window])
                    for c in table
                ]
                for r in range(ranks)
            ]
            updates += 1
            run.update(rows, weighted=weighted)
            ends = first + plan.accumulate >= len(lows)
            if ends or updates % local.every == 0:
                run.average()
    return list(run.nets[0].parameters()), updates


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    n=st.integers(3, 60),
    size=st.integers(1, 3),
    every=st.integers(1, 4),
    outer=st.sampled_from([None, (0.7, 0.9, True), (0.5, 0.4, False), (1.0, 0.0, False)]),
    accumulate=st.integers(1, 3),
    weighted=st.booleans(),
)
@example(n=37, size=2, every=3, outer=(0.7, 0.9, True), accumulate=1, weighted=False)
@example(n=33, size=2, every=2, outer=None, accumulate=2, weighted=True)
def test_copies_train_and_are_averaged_as_by_hand(
    cluster, n, size, every, outer, accumulate, weighted
):
    local = fx.LocalSGD(every=every)
    if outer is not None:
        lr, momentum, nesterov = outer
        local = fx.DiLoCo(every=every, outer_lr=lr, outer_momentum=momentum, nesterov=nesterov)
    if cluster.n == 1:  # one copy trains as if there were no such plan
        local = fx.LocalSGD(every=every)
    plan = fx.Plan(local=local, accumulate=accumulate, even="uneven")
    wanted, updates = _by_hand(cluster.n, n, size, plan, weighted)
    answers = cluster.run(_train, n, size, plan, weighted)
    for got, made in answers:
        assert made == updates
        for mine, first, theirs in zip(got, answers[0][0], wanted, strict=True):
            assert torch.equal(mine, first), "copies differ at the end of the data"
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-7, atol=1e-9)
