"""`fx.update` under ZeRO: the run of `fx.step`, in every bit."""

import pytest

import fxtrain as fx
from tests.cluster._both_ways import Case, both_ways, check_equal
from tests.deepspeed._ranks import on_rank

pytestmark = pytest.mark.deepspeed


@on_rank
def _compared(ctx, plan, case):
    return both_ways(ctx, plan, case)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_update_is_a_step_in_every_bit(pair, stage):
    plan = fx.Plan(
        strategy=fx.DeepSpeed(stage=stage), accumulate=3, clip_norm=0.1, precision="bf16"
    )
    check_equal(pair.run(_compared, plan, Case(rows=14, weighted=True)))
