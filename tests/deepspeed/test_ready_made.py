"""Optimizers and schedulers that were made before DeepSpeed's engine."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from tests.deepspeed._ranks import on_rank

pytestmark = pytest.mark.deepspeed

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
