"""Two models that train each other: a maker, and a judge of what it makes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx


def nets(dtype=torch.float64):
    """The maker and the judge, with the same values on every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        sizes = ((2, 6, 3), (3, 6, 1))
        return [
            nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c)).to(dtype)
            for a, b, c in sizes
        ]


def data(rows, dtype=torch.float64):
    """Noise for the maker, and what is real."""
    generator = torch.Generator().manual_seed(2)
    columns = torch.randn(rows, 2, generator=generator), torch.randn(rows, 3, generator=generator)
    return TensorDataset(*(column.to(dtype) for column in columns))


def makers_loss(judge, maker, noise):
    return F.softplus(-judge(maker(noise))).mean()


def error_inside_a_window(ctx, plan, optimizer, judges_loss, reaches, dtype=torch.float64):
    """The error of a maker's backward in the first window of the judge.

    Args:
        reaches: The maker's loss, as `makers_loss`.
    """
    maker, judge = (fx.wrap(net, ctx, plan, optimizer=optimizer) for net in nets(dtype))
    of_judge = fx.StepFns(model=judge, loss=lambda m, b: judges_loss(m, maker, *b))
    of_maker = fx.StepFns(model=maker, loss=lambda m, b: reaches(judge, m, b[0]))
    batch = next(iter(fx.shard(DataLoader(data(16, dtype), batch_size=2), ctx, plan)))
    fx.step(ctx, batch, of_judge)
    try:
        fx.step(ctx, batch, of_maker)
    except fx.errors.StepError as error:
        return str(error)
    return None
