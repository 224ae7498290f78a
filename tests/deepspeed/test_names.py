"""The names of a module on a model that DeepSpeed trains."""

import pytest
import torch

import fxtrain as fx
from tests.cluster._names import names
from tests.deepspeed._ranks import on_rank

pytestmark = pytest.mark.deepspeed


@on_rank
def _names(ctx, stage, precision):
    strategy = fx.DeepSpeed(stage=stage, persistence_threshold=0)
    return names(ctx, {"strategy": strategy, "precision": precision}, None, torch.float32)


@pytest.mark.parametrize(
    ("stage", "precision", "state_dict", "generate"),
    [(1, "fp32", True, True), (1, "bf16", False, True), (3, "fp32", False, False)],
)
def test_a_stage_has_the_names_that_it_makes_right(pair, stage, precision, state_dict, generate):
    for found in pair.run(_names, stage, precision):
        assert found["parameters"] and found["modules"] and found["config"] and found["device"]
        assert (found["state_dict"] is True) == state_dict, found["state_dict"]
        assert (isinstance(found["generate"], bool)) == generate, found["generate"]
        assert state_dict or "dict(fx.weights(model))" in found["state_dict"]
        assert generate or "fx.gathered(model)" in found["generate"]
        assert found["deepcopy"].startswith("CopyError")
