"""The laws of strategies at every stage, in float32, since DeepSpeed has no float64."""

import pytest
import torch

import fxtrain as fx
from fxtrain.testing import LAWS, Terms
from tests.deepspeed._ranks import Ranks

pytestmark = pytest.mark.deepspeed

TERMS = Terms(
    dtype=torch.float32,
    rtol=1e-4,
    atol=1e-5,
    clip_value=False,
    fp16=False,  # not on a CPU
    exact=False,
)
PLANS = {
    "stage 0": fx.Plan(strategy=fx.DeepSpeed(stage=0)),
    "stage 1": fx.Plan(strategy=fx.DeepSpeed(stage=1)),
    "stage 2": fx.Plan(strategy=fx.DeepSpeed(stage=2, reduce_bucket=1000)),
    "stage 3": fx.Plan(strategy=fx.DeepSpeed(stage=3, persistence_threshold=0)),
    "stage 3, leaves, recomputed": fx.Plan(
        strategy=fx.DeepSpeed(stage=3, leaf_modules=("Block",)), recompute=("Block",)
    ),
}
BY_NAME = {law.__name__: law for law in LAWS}
NAMES = sorted(BY_NAME.keys() - {"overflow_skips_everywhere"})


@pytest.mark.parametrize("law", NAMES)
@pytest.mark.parametrize("name", PLANS)
def test_a_stage_obeys(clusters, name, law):
    n = 1 if law == "one_rank_is_the_loop" else 2
    BY_NAME[law](Ranks(clusters[n]), PLANS[name], terms=TERMS)


@pytest.mark.parametrize("law", ["same_in_micro_batches", "resumes_where_it_stopped"])
def test_copies_of_the_parameters_on_each_half_of_the_ranks(clusters, law):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=3, partial_ranks=2, persistence_threshold=0))
    BY_NAME[law](Ranks(clusters[4]), plan, terms=TERMS)
