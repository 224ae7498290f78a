"""Training loops that run alike on real ranks and on pretended ones."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(30, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 70), nn.Linear(70, 10)
    )


def rows() -> DataLoader:
    return DataLoader(torch.ones(20_000, 30), batch_size=8)


def by_steps(ctx, plan, *weights):
    """fxtrain's own loop, for as long as it is let."""
    model = fx.wrap(net(), ctx, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))

    def loss(model, batch):
        out = model(batch.data)
        total = F.mse_loss(out, torch.zeros_like(out), reduction="sum")
        return fx.Weighted(total, batch.valid.sum()) if weights else total / out.numel()

    fns = fx.StepFns(model=model, loss=loss)
    for epoch in fx.shard(rows(), ctx, plan).epochs(1):
        for batch in epoch:
            fx.step(ctx, batch, fns)


def on_tensor_mesh(ctx, plan):
    """The same loop where pairs of ranks split layers."""
    with on_mesh(ctx, fx.Mesh(replicate=2, tensor=2)) as placed:
        by_steps(placed, plan)


def on_context_mesh(ctx, plan):
    """A transformer where pairs of ranks share sequences."""
    with on_mesh(ctx, fx.Mesh(replicate=2, context=2)) as placed:
        model = fx.wrap(Transformer(), placed, plan, optimizer=torch.optim.AdamW)
        tokens = torch.zeros(20_000, Transformer.LENGTH, dtype=torch.int64)
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
        for batch in fx.shard(DataLoader(tokens, batch_size=2), placed, plan):
            fx.step(placed, batch, fns)


def on_pipeline_mesh(ctx, plan, mesh, *counted):
    """A transformer in stages, which the last one may count something beside the loss."""

    def loss(model, batch):
        logits_BTV = model(batch.data)
        mean = logits_BTV.square().mean()
        if not counted:
            return mean
        return mean, {"size": mean.detach(), "words": batch.data.new_tensor(logits_BTV.numel())}

    with on_mesh(ctx, mesh) as placed:
        model = fx.wrap(Transformer(), placed, plan, optimizer=torch.optim.AdamW)
        tokens = torch.zeros(20_000, Transformer.LENGTH, dtype=torch.int64)
        fns = fx.StepFns(model=model, loss=loss)
        with torch.no_grad():
            model(tokens[:4])
        for batch in fx.shard(DataLoader(tokens, batch_size=4), placed, plan):
            report = fx.step(placed, batch, fns)
            assert not counted or report.aux["size"].dtype == torch.float64


def sharded_by_hand(ctx, replicas):
    """FSDP2 without fxtrain, over a mesh of the script's own."""
    model = net()
    sizes = (replicas, ctx.world_size // replicas)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    mesh = mesh["shard"] if replicas == 1 else mesh
    for part in (model[0], model[3]):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in rows():
        model(batch).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
