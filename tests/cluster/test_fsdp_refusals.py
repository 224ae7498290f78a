"""Models that FSDP cannot shard or train, refused with what to do."""

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.testing import fake_world
from tests.cluster._frozen import adamw, data, net

PLAN = fx.Plan(strategy=fx.FSDP(), batch="global")


def _refused(module, **config):
    with fake_world(2) as ctx, pytest.raises(fx.PlanError) as caught:
        fx.wrap(module, ctx, fx.Plan(strategy=fx.FSDP(**config)))
    return str(caught.value)


def test_sparse_gradients_are_refused():
    told = _refused(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)))
    assert "sparse gradients, which 0 compute with sparse=True. Set sparse=False, or" in told


def test_two_trained_dtypes_in_a_unit_are_refused():
    module = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    told = _refused(module)
    assert "a unit of Sequential has 0.weight in bfloat16 and 1.weight in float32." in told


@pytest.mark.parametrize("way", ["frozen", "ignored", "units"])
def test_two_dtypes_are_accepted_where_one_buffer_has_one(way):
    module = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    config = {"ignored": {"ignore": ("0.*",)}, "units": {"min_params": 1}}.get(way, {})
    if way == "frozen":
        module[0].requires_grad_(False)
    with fake_world(2) as ctx:
        model = fx.wrap(module, ctx, fx.Plan(strategy=fx.FSDP(**config)))
        assert isinstance(model, fx.Wrapped)


def test_a_part_of_another_wrapped_model_is_refused_until_that_is_unwrapped():
    body = nn.Linear(4, 4)
    with fake_world(2) as ctx:
        first = fx.wrap(nn.Sequential(body, nn.Linear(4, 2)), ctx, PLAN)
        with pytest.raises(fx.PlanError, match="sharded already, by another wrapped model"):
            fx.wrap(nn.Sequential(body, nn.Linear(4, 1)), ctx, PLAN)
        fx.unwrap(first)
        assert fx.wrap(nn.Sequential(body, nn.Linear(4, 1)), ctx, PLAN).module[0] is body


def _penalty(ctx):
    model = fx.wrap(net(), ctx, PLAN, optimizer=adamw)

    def loss(model, batch):
        x = batch[0].clone().requires_grad_(True)
        out = model(x).square().mean()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        return out + slope.square().sum()

    with pytest.raises(fx.errors.StepError, match="needs them a second time") as caught:
        fx.step(ctx, next(iter(fx.shard(data(), ctx, PLAN))), fx.StepFns(model, loss))
    return str(caught.value)


def test_a_second_derivative_under_fsdp_is_named(pair):
    assert all("Use DDP() for this model." in one for one in pair.run(_penalty))
