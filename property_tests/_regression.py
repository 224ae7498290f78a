"""A small regression on which laws of training are tried: rows, a network and losses."""

import torch
from torch import nn

import fxtrain as fx


def rows(n):
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, (x.sum(1, keepdim=True) * 2).sin()


def net():
    """The network, with the same values each time."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return net


def losses(model, x, y):
    """The loss of each row."""
    return (model(x) - y).square().squeeze(1)


def mean(model, batch):
    return losses(model, *batch).mean()


def weighted(model, batch):
    """The mean over rows that are not padding."""
    each = losses(model, *batch) * batch.valid
    return fx.Weighted(each.sum(), batch.valid.sum())
