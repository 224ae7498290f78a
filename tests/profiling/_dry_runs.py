"""A dry run of one layer."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx

OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
# docs/dry_run.md says so.
DRY_DDP = pytest.mark.skipif(
    OLD_TORCH,
    reason="collectives of process groups take no fake tensors in torch 2.9",
)
ALLOWED_PLAN = fx.Plan()


def train_linear(ctx, *, width=100, plan=ALLOWED_PLAN, after=None, workers=0):
    """An endless loop over one square matrix."""
    net = nn.Linear(width, width, bias=False)
    model = fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.Adam(params))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
    loader = DataLoader(
        torch.ones(1, width).expand(99_999, width), batch_size=4, num_workers=workers
    )
    while True:
        for batch in fx.shard(loader, ctx, plan):
            report = fx.step(ctx, batch, fns)
            if after is not None:
                after(model, report)


def dry_linear(fn=train_linear, *, world=8, mesh=None, device_memory=None, **changes):
    call = functools.partial(fn, **changes)
    return fx.dry_run(call, world=world, mesh=mesh, device_memory=device_memory)
