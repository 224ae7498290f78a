"""Handles of a small network."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx

FSDP = fx.FSDP(min_params=1)


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def adam(params):
    return torch.optim.AdamW(params, lr=0.01)


def new_handle(ctx, strategy, net=None, **options):
    plan = fx.Plan(strategy=strategy, **options)
    model = fx.wrap(sequential() if net is None else net, ctx, plan, optimizer=adam)
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch[0]).square().mean())
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    return model, fns, fx.shard(DataLoader(TensorDataset(rows), batch_size=4), ctx, plan)
