"""Models and losses that a strategy cannot train: errors that name the module, or what to use."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxtrain as fx
from tests._errors import raises_code


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


@pytest.fixture
def ctx():
    with fx.detect(env={}, device="cpu") as ctx:
        yield ctx


def _wrapped_lazy(ctx):
    net = nn.Sequential(nn.LazyLinear(4), nn.ModuleDict({"norm": nn.LazyBatchNorm1d()}))
    with pytest.raises(fx.errors.PlanError) as caught:
        fx.wrap(net, ctx, optimizer=sgd)
    return str(caught.value)


@pytest.mark.parametrize("n", [1, 2])
def test_a_lazy_module_is_named(clusters, n):
    for text in clusters[n].run(_wrapped_lazy):
        assert "parameters of 0 (LazyLinear), 1.norm (LazyBatchNorm1d)" in text
        assert "Run the model once on one batch" in text


class _Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Module()
        self.mix.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head((x.to(torch.complex64) @ self.mix.weight).abs())


def _trained_complex(ctx, strategy):
    torch.manual_seed(0)
    try:
        model = fx.wrap(_Complex(), ctx, fx.Plan(strategy=strategy), optimizer=sgd)
    except fx.errors.PlanError as error:
        return str(error)
    fns = fx.StepFns(model, lambda m, batch: m(batch.data).square().mean())
    for _ in range(2):
        fx.step(ctx, fx.batch(torch.full((2, 4), 1.0 + ctx.rank), ctx), fns)
    return {name: value.clone() for name, value in fx.weights(model)}


def test_complex_parameters_beside_real_ones_are_named_under_fsdp(pair):
    for text in pair.run(_trained_complex, fx.FSDP()):
        assert "the complex mix.weight are in units with real ones" in text
    wanted = pair.run(_trained_complex, fx.DDP())[0]
    for weights in pair.run(_trained_complex, fx.FSDP(ignore=("mix.weight",))):
        torch.testing.assert_close(weights, wanted)


def _penalized(ctx, strategy):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model = fx.wrap(net, ctx, fx.Plan(strategy=strategy), optimizer=sgd)

    def loss(model, batch):
        x = batch.data.clone().requires_grad_()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + (slope.norm(dim=1) - 1).square().mean()

    try:
        fx.step(ctx, fx.batch(torch.ones(2, 4), ctx), fx.StepFns(model, loss))
    except fx.errors.StepError as error:
        return str(error)
    return "trained"


def test_a_gradient_penalty_under_fsdp_is_refused(pair):
    assert set(pair.run(_penalized, fx.DDP())) == {"trained"}
    for text in pair.run(_penalized, fx.FSDP()):
        assert "create_graph=True" in text
        assert "Use DDP()" in text


class _Shared(nn.Module):
    """A block that forward runs twice, recomputed by torch's reentrant function."""

    def __init__(self):
        super().__init__()
        self.block, self.first = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)
        return x


def _recomputed(ctx, strategy):
    torch.manual_seed(0)
    model = fx.wrap(_Shared(), ctx, fx.Plan(strategy=strategy), optimizer=sgd)
    fns = fx.StepFns(model, lambda m, batch: m(batch.data).square().mean())
    try:
        fx.step(ctx, fx.batch(torch.ones(2, 4), ctx), fns)
    except fx.errors.StepError as error:
        return str(error)
    return "trained"


def test_reentrant_recomputation_of_a_shared_block_says_what_to_use(pair):
    for text in pair.run(_recomputed, fx.DDP()):
        assert "use_reentrant=False" in text
        assert "fx.DDP(static_graph=True)" in text
    assert set(pair.run(_recomputed, fx.DDP(static_graph=True))) == {"trained"}


def test_a_part_of_a_wrapped_model_and_a_model_with_a_wrapped_part_are_refused(ctx):
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    inner = fx.wrap(net[1], ctx)
    with raises_code("FX200", "1 of this Sequential"):
        fx.wrap(net, ctx)
    fx.unwrap(inner)
    whole = fx.wrap(net, ctx)
    with raises_code("FX200", "1.0"):
        fx.wrap(net[1][0], ctx)
    with raises_code("FX200", "this Sequential"):
        fx.wrap(net, ctx)
    fx.unwrap(whole)
    fx.wrap(net[1][0], ctx)
