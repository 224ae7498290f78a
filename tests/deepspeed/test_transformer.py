"""The laws' transformer, tied and partly frozen, against a loop on torch alone.

The laws themselves ask for float64 and for clipped entries, neither of which DeepSpeed has.
"""

import attrs
import pytest
import torch

import fxtrain as fx
from fxtrain.testing import Task, by_hand, on_ranks
from tests.deepspeed._ranks import on_rank

pytestmark = pytest.mark.deepspeed

BASE = Task(plan=fx.Plan(), dtype=torch.float32)
TASKS = {
    "plain": BASE,
    "micro-batches": attrs.evolve(BASE, plan=fx.Plan(accumulate=3)),
    "tokens": attrs.evolve(BASE, weighted=True),
    "tokens in windows": attrs.evolve(BASE, weighted=True, plan=fx.Plan(accumulate=2)),
    "clipped": attrs.evolve(BASE, plan=fx.Plan(clip_norm=0.05)),
    "frozen": attrs.evolve(BASE, frozen=True),
    "recomputed": attrs.evolve(BASE, plan=fx.Plan(recompute=("Block",))),
}
PLANS = {
    "stage 0": fx.DeepSpeed(stage=0),
    "stage 1": fx.DeepSpeed(stage=1),
    "stage 2": fx.DeepSpeed(stage=2, reduce_bucket=1000),
    "stage 3": fx.DeepSpeed(stage=3, persistence_threshold=0),
    "stage 3, leaves": fx.DeepSpeed(stage=3, leaf_modules=("Block",)),
}


@on_rank
def _trained(ctx, task):
    return on_ranks(ctx, task)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", PLANS)
def test_a_run_is_that_of_one_process(pair, name, task):
    wanted = by_hand(TASKS[task], pair.n)
    plan = attrs.evolve(TASKS[task].plan, strategy=PLANS[name])
    for run in pair.run(_trained, attrs.evolve(TASKS[task], plan=plan)):
        assert run.losses == pytest.approx(wanted.losses, rel=1e-4)
        assert run.norms == pytest.approx(wanted.norms, rel=1e-3)
        assert run.applied == wanted.applied and run.tied
        assert run.parameters.keys() == wanted.parameters.keys()
        for key, value in wanted.parameters.items():
            torch.testing.assert_close(run.parameters[key], value, rtol=1e-3, atol=1e-4)
