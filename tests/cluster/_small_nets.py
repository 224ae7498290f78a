"""Small networks on ranks, their data and their loss."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx

SGD = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)))


def small_net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


def small_data(n=32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def square_loss(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def train_small(
    ctx, plan, optimizer=SGD, scheduler=None, epochs=2, size=4, net=None, loss=square_loss
):
    model = fx.wrap(net or small_net(), ctx, plan, optimizer=optimizer, scheduler=scheduler)
    loader = fx.shard(DataLoader(small_data(), batch_size=size), ctx, plan)
    fns = fx.StepFns(model=model, loss=loss)
    reports = [fx.step(ctx, batch, fns) for epoch in loader.epochs(epochs) for batch in epoch]
    return model, reports
