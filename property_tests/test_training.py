"""Training laws on real ranks: any split of the data gives the update of one process."""

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from property_tests import _regression

ON_RANKS = settings(
    max_examples=12, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate]
)


def _train(ctx, n, size, plan, *, weighted, epochs=2):
    model = fx.wrap(
        _regression.net(),
        ctx,
        plan,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.5),
    )
    loader = fx.shard(DataLoader(TensorDataset(*_regression.rows(n)), batch_size=size), ctx, plan)
    fns = fx.StepFns(model=model, loss=_regression.weighted if weighted else _regression.mean)
    applied = 0
    for epoch in loader.epochs(epochs):
        for batch in epoch:
            report = fx.step(ctx, batch, fns)
            applied += report.applied
    updates = report.position.updates if n else 0
    return [p.detach().clone() for p in model.parameters()], updates, applied


def _one_process(n, stride, accumulate, clip, *, drop, epochs=2):
    """The loop as one would write it: each window's rows in one batch."""
    net = _regression.net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.5)
    x, y = _regression.rows(n)
    end = n // stride * stride if drop else n
    updates = 0
    for _ in range(epochs):
        for low in range(0, end, stride * accumulate):
            high = min(low + stride * accumulate, end)
            optimizer.zero_grad()
            _regression.losses(net, x[low:high], y[low:high]).mean().backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            updates += 1
    return list(net.parameters()), updates


@ON_RANKS
@given(data=st.data())
def test_ranks_and_micro_batches_equal_one_process_on_one_batch(cluster, data):
    size = data.draw(st.integers(1, 5), label="batch size")
    accumulate = data.draw(st.integers(1, 4), label="accumulate")
    even, weighted = data.draw(
        st.sampled_from([("pad", True), ("uneven", True), ("uneven", False), ("drop", False)])
    )
    least = size * cluster.n if even == "drop" else (cluster.n - 1) * size + 1
    n = data.draw(st.integers(least, 40), label="rows")
    clip = data.draw(st.sampled_from([None, 0.05]), label="clip")
    sync_each = data.draw(st.booleans(), label="sync_each")
    plan = fx.Plan(accumulate=accumulate, even=even, clip_norm=clip, sync_each=sync_each)
    wanted, updates = _one_process(n, size * cluster.n, accumulate, clip, drop=even == "drop")
    for got, counted, _ in cluster.run(_train_weighted if weighted else _train_mean, n, size, plan):
        assert counted == updates
        for mine, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def _train_weighted(ctx, n, size, plan):
    return _train(ctx, n, size, plan, weighted=True)


def _train_mean(ctx, n, size, plan):
    return _train(ctx, n, size, plan, weighted=False)


class _Stream(torch.utils.data.IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(zip(*_regression.rows(self.n), strict=True))


def _train_stream(ctx, n, size, plan):
    model = fx.wrap(
        _regression.net(), ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.3)
    )
    loader = fx.shard(DataLoader(_Stream(n), batch_size=size), ctx, plan)
    fns = fx.StepFns(model=model, loss=_regression.mean)
    for epoch in loader.epochs(1):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    return [p.detach().clone() for p in model.parameters()]


def _train_table(ctx, n, size, plan):
    model = fx.wrap(
        _regression.net(), ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.3)
    )
    loader = fx.shard(DataLoader(TensorDataset(*_regression.rows(n)), batch_size=size), ctx, plan)
    fns = fx.StepFns(model=model, loss=_regression.mean)
    for epoch in loader.epochs(1):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    return [p.detach().clone() for p in model.parameters()]


@ON_RANKS
@given(data=st.data())
def test_windows_of_unknown_length_come_out_the_same(cluster, data):
    size = data.draw(st.integers(1, 4), label="batch size")
    n = data.draw(st.integers((cluster.n - 1) * size + 1, 30), label="rows")
    even = data.draw(st.sampled_from(["pad", "uneven"]))
    if even == "pad":  # a stream repeats other rows than a table does, where any are padded
        n = max(n // (cluster.n * size), 1) * cluster.n * size
    accumulate = data.draw(st.integers(1, 4), label="accumulate")
    plan = fx.Plan(accumulate=accumulate, even=even)
    stream = cluster.run(_train_stream, n, size, plan)
    table = cluster.run(_train_table, n, size, plan)
    for mine, theirs in zip(stream[0], table[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)
    for rank in stream:
        assert all(torch.equal(a, b) for a, b in zip(rank, stream[0], strict=True))
