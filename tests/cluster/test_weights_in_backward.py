"""Ranks exchange the weights of `Weighted` losses while backward runs."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

_ROWS = torch.arange(24.0).reshape(8, 3) / 8


def _net():
    net = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 4)
    return net


def _sgd(params):
    return torch.optim.SGD(params, lr=0.5)


def _wanted(accumulate):
    """One process: the gradient of the total over the weight of each window, over all ranks."""
    net = _net()
    optimizer = _sgd(net.parameters())
    for window in _ROWS.split(4 * accumulate):
        optimizer.zero_grad()
        (net(window).square().sum() / (_weight(window) * len(window))).backward()
        optimizer.step()
    return [p.tolist() for p in net.parameters()]


def _weight(rows):
    """Equal in every window, and no power of two."""
    return 3.0


def _trained(ctx, plan, inside):
    model = fx.wrap(_net(), ctx, plan, optimizer=_sgd)
    sums = []

    def loss(model, batch):
        out = model(batch[0])
        if inside:  # a collective of the user's on the same ranks, while the weights travel
            out.register_hook(lambda _: sums.append(ops.reduce(ctx.rank + 1, ctx, op="sum")))
        return fx.Weighted(out.square().sum(), _weight(batch[0]) * len(batch[0]))

    fns = fx.StepFns(model=model, loss=loss)
    for batch in fx.shard(DataLoader(TensorDataset(_ROWS), batch_size=2), ctx, plan):
        fx.step(ctx, batch, fns)
    return [value.tolist() for _, value in fx.weights(model)], sums


@pytest.mark.parametrize("strategy", [fx.DDP(), fx.FSDP()], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("inside", [False, True])
def test_updates_are_those_of_one_process(pair, strategy, accumulate, inside):
    plan = fx.Plan(strategy=strategy, accumulate=accumulate)
    for weights, sums in pair.run(_trained, plan, inside):
        torch.testing.assert_close(weights, _wanted(accumulate), rtol=1e-5, atol=1e-6)
        assert sums == [3] * (2 * inside)


def _at_rank_weights(ctx, weights):
    model = fx.wrap(_net(), ctx, fx.Plan(), optimizer=_sgd)
    fns = fx.StepFns(
        model=model,
        loss=lambda model, batch: fx.Weighted(model(batch[0]).sum(), weights[ctx.rank]),
    )
    batch = next(iter(fx.shard(DataLoader(TensorDataset(_ROWS), batch_size=4), ctx)))
    report = fx.step(ctx, batch, fns)
    return report.applied, [value.tolist() for _, value in fx.weights(model)]


def test_a_window_without_weight_changes_nothing(pair):
    kept = [p.tolist() for p in _net().parameters()]
    assert pair.run(_at_rank_weights, (0.0, 0.0)) == [(True, kept)] * 2


def test_ranks_of_different_weights_take_the_mean_over_all_items(pair):
    net = _net()
    (net(_ROWS).sum() / 8).backward()
    wanted = [(p - 0.5 * p.grad).tolist() for p in net.parameters()]
    for applied, found in pair.run(_at_rank_weights, (2.0, 6.0)):
        assert applied
        torch.testing.assert_close(found, wanted)


def _scaled(ctx, plan, scale):
    """The exponent by which gradients differ from those of the mean, before their correction."""
    model = fx.wrap(_net(), ctx, plan, optimizer=_sgd)
    seen = []
    model.module.weight.register_hook(lambda grad: seen.append(grad.sum().item()))
    loss = lambda model, batch: fx.Weighted(model(batch[0]).sum() * scale, 12.0)  # noqa: E731
    batch = next(iter(fx.shard(DataLoader(TensorDataset(_ROWS), batch_size=4), ctx)))
    fx.step(ctx, batch, fx.StepFns(model=model, loss=loss))
    return seen[0]


def test_a_hook_that_rounds_gradients_gets_the_scale_of_the_mean(pair):
    """With fp16 on the way, the weights are exchanged before backward."""
    total = float(_ROWS[:4].sum()) * 2  # rank 0's gradient of the sum, over both outputs
    free, rounded = (
        pair.run(_scaled, fx.Plan(strategy=fx.DDP(hook=fx.CommHook(name=name))), 1.0)[0]
        for name in ("none", "fp16")
    )
    assert rounded == pytest.approx(total * 2 / 24)
    assert free == total * 0.25  # two ranks, eight rows: exact
