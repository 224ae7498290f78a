"""The learning-rate range test: what it finds, and that it leaves no trace."""

import math
import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from tests._errors import raises_code

ROWS = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
PLANS = {
    "single, fp16": (1, fx.Plan(precision="fp16", accumulate=2, clip_norm=1.0)),
    "ddp": (2, fx.Plan(accumulate=2)),
    "ddp, sharded optimizer": (2, fx.Plan(strategy=fx.DDP(shard_optimizer=True))),
    "fsdp": (2, fx.Plan(strategy=fx.FSDP(min_params=1), nonfinite="raise")),
}


def _adam(params):
    first, *others = params
    return torch.optim.Adam([{"params": [first]}, {"params": others, "lr": 2e-3}], lr=1e-3)


def _loss(model, batch):
    return model(batch[0]).float().square().mean()


def _trained(ctx, plan, finds, error=None):
    """Weights, losses and random numbers of a run, and what was found before and within it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 1))
    model = fx.wrap(
        net,
        ctx,
        plan,
        optimizer=_adam,
        scheduler=lambda made: torch.optim.lr_scheduler.ExponentialLR(made, 0.9),
    )
    loader = fx.shard(DataLoader(TensorDataset(ROWS), batch_size=3, shuffle=True), ctx, plan)
    fns = fx.StepFns(model=model, loss=_loss)
    fx.ops.seed(5, ctx, per_rank=True)
    curves, losses = [], []
    for epoch in loader.epochs(2):
        if finds:
            how = {"start": 1e-4, "stop": 1e3, "updates": 12}
            curves.append(fx.tuning.find_lr(ctx, fns, loader.at(epoch.position), **how))
            broken = fx.StepFns(model=model, loss=_break_second)
            with pytest.raises(KeyError):
                fx.tuning.find_lr(ctx, broken, loader, **how)
        losses += [float(fx.step(ctx, batch, fns).loss) for batch in epoch]
    weights = {name: value.tolist() for name, value in fx.weights(model, device="cpu")}
    rates = [group["lr"] for group in model.optimizer.param_groups]
    scale = model.scaler and model.scaler.state_dict()
    return (weights, losses, rates, scale, torch.rand(1).item(), random.random()), curves


def _break_second(model, batch):
    if batch.position.index > 6:
        raise KeyError
    return _loss(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_a_run_is_the_same_with_it_and_without(clusters, name):
    ranks, plan = PLANS[name]
    found = clusters[ranks].run(_trained, plan, True)
    wanted = clusters[ranks].run(_trained, plan, False)
    assert [one for one, _ in found] == [one for one, _ in wanted]
    curves = [one for _, one in found]
    assert curves[0] == curves[-1]
    assert curves[0][0].rates[0] == 1e-4 and curves[0][0] != curves[0][1]
    assert len(curves[0][0].rates) > 2


def _quadratic(ctx, **how):
    """Gradient descent on w² diverges above rate 1: each update multiplies w by 1 - 2 · rate."""
    net = nn.Linear(1, 1, bias=False)
    net.weight.data.fill_(1.0)
    model = fx.wrap(net, ctx, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    loader = fx.shard(DataLoader(torch.ones(4, 1), batch_size=2), ctx)
    return fx.tuning.find_lr(ctx, fns, loader, **how)


def test_losses_are_those_of_the_rates():
    with fx.detect(env={}, device="cpu") as ctx:
        curve = _quadratic(ctx, start=1e-3, stop=1e3, updates=61)
    weight, wanted = 1.0, []
    for rate in curve.rates:
        wanted.append(weight**2)
        weight *= 1 - 2 * rate
    assert curve.losses == pytest.approx(wanted, rel=1e-4)
    assert len(curve.rates) < 61
    assert curve.rates[0] == 1e-3 and curve.rates[10] == pytest.approx(1e-2)
    assert 0.01 < curve.suggestion < 1


def test_suggestions_of_a_curve_with_noise():
    """It falls around rate 0.01, and rises again from 1 on."""
    rates = tuple(10 ** (n / 25 - 4) for n in range(125))
    noise = torch.randn(len(rates), generator=torch.Generator().manual_seed(0)).mul(0.05).tolist()
    losses = tuple(
        3 - 2 / (1 + (0.01 / rate) ** 2) + rate**2 / 50 + more
        for rate, more in zip(rates, noise, strict=True)
    )
    curve = fx.tuning.RateCurve(rates=rates, losses=losses)
    assert 0.005 < curve.suggestion < 0.02


def test_a_loss_that_never_falls_suggests_nothing():
    curve = fx.tuning.RateCurve(rates=(0.1, 1.0, 10.0), losses=(1.0, 2.0, 3.0))
    assert curve.suggestion is None
    empty = fx.tuning.RateCurve(rates=(), losses=())
    assert empty.suggestion is None


@pytest.mark.parametrize(
    "how", [{"start": 0.0}, {"stop": 1e-9}, {"updates": 1}, {"diverged": 1}, {"stop": math.inf}]
)
def test_wrong_arguments_are_named(how):
    with (
        fx.detect(env={}, device="cpu") as ctx,
        raises_code("FX200", next(iter(how))),
    ):
        _quadratic(ctx, **how)


def test_an_open_window_is_refused():
    with fx.detect(env={}, device="cpu") as ctx:
        plan = fx.Plan(accumulate=2)
        model = fx.wrap(nn.Linear(1, 1), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        loader = fx.shard(DataLoader(torch.ones(4, 1), batch_size=1), ctx, plan)
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
        fx.step(ctx, next(iter(loader)), fns)
        with raises_code("FX500", "window"):
            fx.tuning.find_lr(ctx, fns, loader)


def test_values_in_other_places_are_refused():
    place = fx.state.Placement(units=(fx.state.Unit(name="", device="cpu"),))
    plan = fx.Plan(strategy=fx.Offload(placement=place))
    with fx.detect(env={}, device="cpu") as ctx:
        model = fx.wrap(nn.Linear(1, 1), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        loader = fx.shard(DataLoader(torch.ones(4, 1)), ctx, plan)
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
        with raises_code("FX200", "Offload"):
            fx.tuning.find_lr(ctx, fns, loader)
