"""A layer that is frozen or unfrozen after `fx.wrap`: followed at stage 0, refused at others."""

import pytest
import torch

import fxtrain as fx
from tests.cluster._frozen import by_hand, on_ranks
from tests.deepspeed._ranks import on_rank

pytestmark = pytest.mark.deepspeed


@on_rank
def _on_ranks(ctx, stage, trained):
    try:
        return on_ranks(ctx, fx.DeepSpeed(stage=stage), trained)
    except fx.errors.StepError as error:
        return str(error)


@pytest.mark.parametrize("trained", [(False, True), (True, False)], ids=["unfrozen", "frozen"])
def test_stage_0_trains_as_one_process(pair, trained):
    truth = by_hand(trained)
    for found in pair.run(_on_ranks, 0, trained):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("trained", [(False, True), (True, False)], ids=["unfrozen", "frozen"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_other_stages_refuse_the_change(pair, stage, trained):
    for told in pair.run(_on_ranks, stage, trained):
        assert told.startswith("requires_grad of 0.weight, 0.bias changed after fx.wrap.")
        assert told.endswith("[FX505]")
