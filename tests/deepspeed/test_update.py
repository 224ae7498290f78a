"""Training under DeepSpeed: updates, frozen layers, ready-made optimizers, two models."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from tests.cluster._both_ways import Case, both_ways, check_equal
from tests.cluster._frozen import by_hand, on_ranks
from tests.cluster._two_models import data, error_inside_a_window, makers_loss, nets
from tests.deepspeed._ranks import on_rank, sgd

pytestmark = pytest.mark.deepspeed


@on_rank
def _compared(ctx, plan, case):
    return both_ways(ctx, plan, case)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_update_is_a_step_in_every_bit(pair, stage):
    plan = fx.Plan(
        strategy=fx.DeepSpeed(stage=stage), accumulate=3, clip_norm=0.1, precision="bf16"
    )
    check_equal(pair.run(_compared, plan, Case(rows=14, weighted=True)))


@on_rank
def _on_ranks(ctx, stage, trained):
    try:
        return on_ranks(ctx, fx.DeepSpeed(stage=stage), trained)
    except fx.errors.StepError as error:
        return str(error)


@pytest.mark.parametrize("trained", [(False, True), (True, False)], ids=["unfrozen", "frozen"])
def test_stage_0_trains_as_one_process(pair, trained):
    truth = by_hand(trained)
    for found in pair.run(_on_ranks, 0, trained):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("trained", [(False, True), (True, False)], ids=["unfrozen", "frozen"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_stages_refuse_the_change(pair, stage, trained):
    for told in pair.run(_on_ranks, stage, trained):
        assert told.startswith("requires_grad of 0.weight, 0.bias changed after fx.wrap.")
        assert told.endswith("[FX505]")


CONFIGS = {
    "stage 1": fx.DeepSpeed(stage=1),
    "stage 3, offload": fx.DeepSpeed(stage=3, offload_optimizer="cpu", cpu_optimizer="torch"),
}


def _made(groups):
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)


def _halved(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def _train(ctx, config, *, ready):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1]},
        {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    plan = fx.Plan(strategy=config)
    if ready:
        optimizer = _made(groups)
        scheduler = _halved(optimizer)
        model = fx.wrap(net, ctx, plan, optimizer=optimizer, scheduler=scheduler)
        assert model.scheduler is scheduler
    else:
        model = fx.wrap(net, ctx, plan, optimizer=lambda _: _made(groups), scheduler=_halved)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(2))
    for batch in fx.shard(DataLoader(x, batch_size=4), ctx, plan):
        fx.update(ctx, batch, model, model(batch.data).square().mean())
    rates = [group["lr"] for group in model.optimizer.param_groups]
    return rates, [value for _, value in fx.weights(model, device="cpu")]


@on_rank
def _both(ctx, config):
    return _train(ctx, config, ready=False), _train(ctx, config, ready=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_they_train_as_factories_do(pair, name):
    for (rates, factories), (rates_ready, ready) in pair.run(_both, CONFIGS[name]):
        assert rates_ready == rates == [0.005, 0.005]
        assert all(map(torch.equal, factories, ready))


PLANS = {
    "stage 1": fx.DeepSpeed(stage=1),
    "stage 2": fx.DeepSpeed(stage=2),
    "stage 2, offload": fx.DeepSpeed(stage=2, offload_optimizer="cpu", cpu_optimizer="torch"),
    "stage 3": fx.DeepSpeed(stage=3, persistence_threshold=0),
}


def _judges_loss(judge, maker, noise, real):
    with torch.no_grad():
        made = maker(noise)
    real, made = judge(torch.cat([real, made])).chunk(2)  # ZeRO takes one call a backward
    return F.softplus(-real).mean() + F.softplus(made).mean()


@on_rank
def _adversaries(ctx, config):
    plan = fx.Plan(strategy=config)
    maker, judge = (fx.wrap(net, ctx, plan, optimizer=sgd) for net in nets(torch.float32))
    loader = fx.shard(DataLoader(data(16, torch.float32), batch_size=4), ctx, plan)
    of_judge = fx.StepFns(model=judge, loss=lambda m, b: _judges_loss(m, maker, *b))
    of_maker = fx.StepFns(model=maker, loss=lambda m, b: makers_loss(judge, m, b[0]))
    for epoch in loader.epochs(2):
        for batch in epoch:
            fx.step(ctx, batch, of_judge)
            fx.step(ctx, batch, of_maker)
    return [p.detach().clone() for m in (maker, judge) for p in fx.unwrap(m).parameters()]


def _by_hand():
    maker, judge = nets(torch.float32)
    of_maker, of_judge = sgd(maker.parameters()), sgd(judge.parameters())
    for _ in range(2):
        for noise, real in DataLoader(data(16, torch.float32), batch_size=8):
            of_judge.zero_grad()
            _judges_loss(judge, maker, noise, real).backward()
            of_judge.step()
            of_maker.zero_grad()
            makers_loss(judge, maker, noise).backward()
            of_maker.step()
    return [p.detach() for net in (maker, judge) for p in net.parameters()]


@pytest.mark.parametrize("name", PLANS)
def test_adversaries_equal_the_raw_loop(pair, name):
    for got in pair.run(_adversaries, PLANS[name]):
        for a, b in zip(got, _by_hand(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@on_rank
def _inside_a_window(ctx):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=1), accumulate=2)
    return error_inside_a_window(ctx, plan, sgd, _judges_loss, makers_loss, torch.float32)


def test_another_models_backward_inside_a_window_is_refused(pair):
    for words in pair.run(_inside_a_window):
        assert words.startswith("The backward of another model's loss reached this Sequential")
