"""Optimizers and schedulers that were made before the model was wrapped."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import (
    ExponentialLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh, token_rows
from tests._slow import slow_after
from tests.cluster._models import PIPELINES

CUTS = (
    fx.Style(modules="blocks.*.attention.[qkv]", style="colwise"),
    fx.Style(modules="blocks.*.attention.o", style="rowwise"),
)
STRATEGIES = {
    "single": (1, fx.Plan(), None),
    "ddp": (2, fx.Plan(), None),
    "shared optimizer": (2, fx.Plan(strategy=fx.DDP(shard_optimizer=True)), None),
    "fsdp": (2, fx.Plan(strategy=fx.FSDP()), None),
    "tensor": (2, fx.Plan(strategy=fx.FSDP(tensor=fx.TP(styles=CUTS))), fx.Mesh(tensor=2)),
    "stages": (2, fx.Plan(strategy=fx.PP()), fx.Mesh(pipeline=2)),
    "local sgd": (2, fx.Plan(local=fx.LocalSGD(every=2)), None),
}


def _groups(named):
    """No weight decay for vectors, and another learning rate for the embedding."""
    named = list(named)
    vectors = [p for _, p in named if p.ndim == 1]
    embedding = [p for name, p in named if name == "embed.weight" or name == "head.weight"]
    rest = [p for name, p in named if p.ndim > 1 and name not in ("embed.weight", "head.weight")]
    return [
        {"params": vectors, "weight_decay": 0.0},
        {"params": embedding, "lr": 0.05},
        {"params": rest, "maximize": False},
    ]


def _made(groups):
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)


def _scheduled(optimizer):
    warm_up = LinearLR(optimizer, 0.5, total_iters=2)
    return SequentialLR(optimizer, [warm_up, ExponentialLR(optimizer, 0.9)], milestones=[2])


def _wrapped(ctx, plan, *, ready):
    net = Transformer()
    if not ready:
        factory = lambda params: _made(_groups(params.named()))  # noqa: E731
        return fx.wrap(net, ctx, plan, optimizer=factory, scheduler=_scheduled), None
    optimizer = _made(_groups(net.named_parameters()))
    scheduler = _scheduled(optimizer)
    model = fx.wrap(net, ctx, plan, optimizer=optimizer, scheduler=scheduler)
    assert model.scheduler is scheduler and scheduler.optimizer is model.optimizer
    shares = isinstance(plan.strategy, fx.DDP) and plan.strategy.shard_optimizer
    assert shares or model.optimizer is optimizer
    return model, optimizer


def _train(ctx, plan, *, ready):
    model, _ = _wrapped(ctx, plan, ready=ready)
    tokens, _ = token_rows(16)
    table = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    loader = fx.shard(DataLoader(table, batch_size=4), ctx, plan)
    fns = fx.StepFns(model, lambda m, b: F.cross_entropy(m(b[0]).flatten(0, 1), b[1].flatten()))
    for batch in loader:
        report = fx.step(ctx, batch, fns)
    rates = [(g["lr"], g["weight_decay"]) for g in model.optimizer.param_groups]
    return rates, report.position.updates, list(fx.weights(model, device="cpu"))


def _both(ctx, plan, mesh):
    with on_mesh(ctx, mesh) as placed:
        return _train(placed, plan, ready=False), _train(placed, plan, ready=True)


@pytest.mark.parametrize(
    "name",
    slow_after(
        3, [pytest.param(name, marks=PIPELINES if name == "stages" else ()) for name in STRATEGIES]
    ),
)
def test_a_ready_made_optimizer_and_scheduler_train_as_factories_do(clusters, name):
    n, plan, mesh = STRATEGIES[name]
    for factories, ready in clusters[n].run(_both, plan, mesh):
        assert ready[:2] == factories[:2]
        for (name_a, a), (name_b, b) in zip(factories[2], ready[2], strict=True):
            assert name_a == name_b and torch.equal(a, b), name_a


def _step(ctx, model):
    batch = next(iter(fx.shard(DataLoader(torch.ones(4, 2), batch_size=4), ctx)))
    return fx.step(ctx, batch, fx.StepFns(model, lambda m, b: m(b.data).square().mean()))


def test_states_that_are_there_are_kept(ctx):
    nets = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        net(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    _step(ctx, fx.wrap(nets[0], ctx, optimizer=optimizers[0]))
    nets[1](torch.ones(4, 2)).square().mean().backward()
    optimizers[1].step()
    assert torch.equal(nets[0].weight, nets[1].weight)


def test_several_of_each_are_taken(ctx):
    net = nn.Linear(2, 2)
    optimizers = {"w": torch.optim.SGD([net.weight], lr=0.5), "b": torch.optim.Adam([net.bias])}
    schedulers = [StepLR(optimizers["w"], 1, gamma=0.5), ReduceLROnPlateau(optimizers["b"])]
    model = fx.wrap(net, ctx, optimizer=optimizers, scheduler=schedulers)
    assert model.optimizer is optimizers and model.scheduler is schedulers
    assert _step(ctx, model).applied
    assert optimizers["w"].param_groups[0]["lr"] == 0.25


def _sharded(ctx, kind):
    net = nn.Linear(4, 4)
    optimizer = kind(net.parameters(), lr=0.1)
    try:
        fx.wrap(net, ctx, fx.Plan(strategy=fx.FSDP(min_params=1)), optimizer=optimizer)
    except fx.PlanError as error:
        return str(error)
    return None


def test_what_cannot_follow_sharded_parameters_is_named(pair):
    for words in pair.run(_sharded, torch.optim.Adagrad):
        assert "this Adagrad has states, and this plan shards parameters." in words


def test_what_is_refused(ctx):
    net, other = nn.Linear(2, 2), nn.Linear(2, 3)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    again = torch.optim.SGD([net.weight], lr=0.1)
    mixed = torch.optim.SGD([net.weight, other.weight], lr=0.1)
    cases = [
        ({"optimizer": mixed}, r"has parameters that are not those of the Linear"),
        ({"optimizer": again, "scheduler": StepLR(sgd, 1)}, "StepLR was built on an optimizer"),
        ({"optimizer": torch.optim.SGD, "scheduler": StepLR(sgd, 1)}, "Pass both, or a"),
        ({"scheduler": StepLR(sgd, 1)}, "was built on an optimizer that fx.wrap did not get"),
    ]
    for given, words in cases:
        with pytest.raises(fx.PlanError, match=words):
            fx.wrap(net, ctx, **given)
    assert sgd.param_groups[0]["params"] == [net.weight, net.bias]
