"""Every strategy: the cost of each operation grows linearly with the model."""

import pytest

import fxtrain as fx
from tests._growth import grows_linearly
from tests.cluster._models import ATTENTION, DOWN, PIPELINES, UP

pytestmark = pytest.mark.slow

TENSOR = fx.TP(styles=(*ATTENTION, UP, DOWN))

PLANS = {
    "single": (1, fx.Single(), None),
    "replicas": (2, fx.DDP(), None),
    "shared optimizer": (2, fx.DDP(shard_optimizer=True), None),
    "shards": (2, fx.FSDP(), None),
    "not sharded": (2, fx.FSDP(mode="none"), None),
    "split": (2, fx.FSDP(tensor=TENSOR), fx.Mesh(tensor=2)),
    "stages": (2, fx.PP(), fx.Mesh(pipeline=2)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[PIPELINES] if n == "stages" else []) for n in PLANS]
)
def test_costs_grow_linearly(clusters, name):
    n, strategy, mesh = PLANS[name]
    grows_linearly(clusters[n], fx.Plan(strategy=strategy), mesh)
