"""DeepSpeed: the cost of each operation grows linearly with the model, at every stage."""

import pytest
import torch

import fxtrain as fx
from fxtrain.testing import Terms, grows_linearly
from tests.deepspeed._ranks import Ranks

pytestmark = pytest.mark.deepspeed

# DeepSpeed's engine compares every parameter with every other when it starts, and its reducer
# looks through all of them for each gradient: these two are its own.
OWN = ("wrap", "step")
# Of weights that stage 3 has spread, export and load_model want them whole.
SPREAD = {3: ("export", "load_model")}
TERMS = Terms(dtype=torch.float32)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_costs_grow_linearly(pair, stage):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage))
    grows_linearly(Ranks(pair), plan, terms=TERMS, without=(*OWN, *SPREAD.get(stage, ())))
