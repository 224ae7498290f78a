"""Runs of a small transformer under plans that compute in float8, emulated."""

import torch
import torch.nn.functional as F
from torch import nn

import fxtrain as fx
from fxtrain.testing import Transformer

UPDATES = 12
RECIPES = {
    "tensorwise": fx.Float8(emulate=True),
    "rowwise": fx.Float8(scaling="rowwise", emulate=True),
    "rowwise_with_gw_hp": fx.Float8(scaling="rowwise_with_gw_hp", emulate=True),
    "mxfp8": fx.MX(emulate=True),
    "mxfp8 bf16": fx.MX(emulate=True, grad_weight="bf16"),
    "mxfp4": fx.MX(format="mxfp4", emulate=True),
}


def plan_of(recipe, strategy=None, **fields):
    """A plan with a recipe; in bf16 without one."""
    precision = "bf16" if recipe is None else fx.Precision(compute="fp8", recipe=recipe)
    return fx.Plan(strategy=strategy or fx.DDP(), precision=precision, **fields)


def net(seed=0):
    return Transformer(seed=seed, dtype=torch.float32, width=32)


def wrapped(ctx, plan, seed=0):
    return fx.wrap(
        net(seed), ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=2e-2)
    )


def _rows(_):
    drawn = torch.Generator().manual_seed(3)
    return torch.randint(24, (16, 8), generator=drawn)


def batches(ctx, plan, count=UPDATES):
    """The same rows for any number of ranks."""
    rows = _rows(0).repeat(count, 1)
    loader = torch.utils.data.DataLoader(rows, batch_size=16 // ctx.axis("data").world_size)
    return fx.shard(loader, ctx, plan)


def loss(model, batch):
    tokens = batch.data
    return F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def train(ctx, model, some):
    """The mean loss of all ranks in each step."""
    fns = fx.StepFns(model=model, loss=loss)
    losses = [fx.step(ctx, batch, fns).loss.detach() for batch in some]
    return fx.ops.reduce(torch.stack(losses), ctx.axis("data"), op="mean").tolist()


def kinds(module):
    """Classes and own attributes of the linear layers."""
    parts = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    return {name: (type(part).__name__, sorted(vars(part))) for name, part in parts.items()}
