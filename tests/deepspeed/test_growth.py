"""DeepSpeed: the cost of each operation grows linearly with the model, at every stage."""

import pytest
import torch

import fxtrain as fx
from fxtrain.testing import Terms
from tests._growth import grows_linearly
from tests.deepspeed._ranks import Ranks

pytestmark = pytest.mark.deepspeed

# DeepSpeed's engine looks for duplicates among all parameters once for each of them when it starts,
# and at stage 3 its coordinator goes through all of them at every module: these are its own.
WITHOUT = {3: ("wrap", "step")}
TERMS = Terms(dtype=torch.float32)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_costs_grow_linearly(pair, stage):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage))
    grows_linearly(Ranks(pair), plan, terms=TERMS, without=WITHOUT.get(stage, ("wrap",)))
