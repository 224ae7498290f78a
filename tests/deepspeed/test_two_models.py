"""Two models that train each other under ZeRO, in float32, since DeepSpeed has no float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import fxtrain as fx
from tests.cluster._two_models import data, error_inside_a_window, makers_loss, nets
from tests.deepspeed._ranks import on_rank, sgd

pytestmark = pytest.mark.deepspeed

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
