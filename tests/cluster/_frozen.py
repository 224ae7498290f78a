"""A run that freezes or unfreezes a layer between updates, on ranks and in one process."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx


def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2)
        )


def data():
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.02)


def _whole(named):
    return torch.cat([one.detach().flatten() for _, one in sorted(named)])


def by_hand(trained):
    """Parameters after an epoch for each of `trained`: whether the first layer is trained in it."""
    module = net()
    optimizer = adamw(module.parameters())
    for is_trained in trained:
        module[0].requires_grad_(is_trained)
        for x, y in data():
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return _whole(module.named_parameters())


def on_ranks(ctx, strategy, trained, accumulate=1, **options):
    """The same under a plan, in rows of all ranks; `accumulate` cuts a batch into micro-batches."""
    plan = fx.Plan(strategy=strategy, batch="global", accumulate=accumulate, **options)
    module = net()
    module[0].requires_grad_(trained[0])
    model = fx.wrap(module, ctx, plan, optimizer=adamw(module.parameters()))
    loader = data() if accumulate == 1 else DataLoader(data().dataset, batch_size=8 // accumulate)
    fns = fx.StepFns(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    epochs = fx.shard(loader, ctx, plan).epochs(len(trained))
    for epoch, is_trained in zip(epochs, trained, strict=True):
        model.module[0].requires_grad_(is_trained)
        for batch in epoch:
            fx.step(ctx, batch, fns)
    return _whole(fx.weights(model))
