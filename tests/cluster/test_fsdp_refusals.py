"""Models that FSDP cannot shard or train, refused with what to do."""

import pytest
from torch import nn

import fxtrain as fx
from fxtrain.testing import fake_world


def _refused(module, **config):
    with fake_world(2) as ctx, pytest.raises(fx.PlanError) as caught:
        fx.wrap(module, ctx, fx.Plan(strategy=fx.FSDP(**config)))
    return str(caught.value)


def test_sparse_gradients_are_refused():
    told = _refused(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2)))
    assert "sparse gradients, which 0 compute with sparse=True. Set sparse=False, or" in told


@pytest.mark.parametrize("way", ["frozen", "ignored", "units"])
def test_two_dtypes_are_accepted_where_one_buffer_has_one(way):
    module = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    config = {"ignored": {"ignore": ("0.*",)}, "units": {"min_params": 1}}.get(way, {})
    if way == "frozen":
        module[0].requires_grad_(False)
    with fake_world(2) as ctx:
        model = fx.wrap(module, ctx, fx.Plan(strategy=fx.FSDP(**config)))
        assert isinstance(model, fx.Wrapped)
