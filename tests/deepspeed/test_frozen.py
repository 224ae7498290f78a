"""A layer that is frozen or unfrozen after `fx.wrap`: followed at stage 0."""

import pytest
import torch

import fxtrain as fx
from tests.cluster._frozen import by_hand, on_ranks
from tests.deepspeed._ranks import on_rank

pytestmark = pytest.mark.deepspeed


@on_rank
def _on_ranks(ctx, stage, trained):
    return on_ranks(ctx, fx.DeepSpeed(stage=stage), trained)


@pytest.mark.parametrize("trained", [(False, True), (True, False)], ids=["unfrozen", "frozen"])
def test_stage_0_trains_as_one_process(pair, trained):
    truth = by_hand(trained)
    for found in pair.run(_on_ranks, 0, trained):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-5)
