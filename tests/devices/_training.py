"""A small network and its training, for tests of devices."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx


def net(width=256):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def adam(params, **settings):
    return torch.optim.AdamW(params, lr=1e-3, **settings)


def loss_of(model, batch):
    return F.cross_entropy(model(batch.data[0]), batch.data[1])


def rows(rows=256):
    torch.manual_seed(2)
    return TensorDataset(torch.randn(rows, 64), torch.randint(10, (rows,)))


def parts(ctx, plan, *, optimizer=adam, module=None):
    """A loader over pinned memory, and functions that train a small network."""
    loader = DataLoader(rows(), batch_size=32, pin_memory=ctx.device.type != "cpu")
    model = fx.wrap(module or net(), ctx, plan, optimizer=optimizer)
    return fx.shard(loader, ctx, plan), fx.StepFns(model=model, loss=loss_of)
