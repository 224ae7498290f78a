"""Training under ZeRO gives what the plain strategies give."""

import pytest
import torch

import fxtrain as fx
from tests.deepspeed._ranks import adamw, mean, outcome, sgd, weighted

pytestmark = pytest.mark.deepspeed


def same(got, wanted, *, rtol=2e-5, atol=2e-6):
    for mine, other in zip(got, wanted, strict=True):
        losses, norms, applied, values = mine
        torch.testing.assert_close(losses, other[0], rtol=rtol, atol=atol)
        assert [norm is None for norm in norms] == [norm is None for norm in other[1]]
        for a, b in zip(norms, other[1], strict=True):
            assert a is None or a == pytest.approx(b, rel=max(rtol, 1e-4))
        assert applied == other[2]
        for a, b in zip(values, other[3], strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


STAGES = [0, 1, 2, 3]
PLANS = {
    "plain": ({}, sgd, mean),
    "adamw": ({}, adamw, mean),
    "accumulate": ({"accumulate": 3}, sgd, mean),
    "clip": ({"clip_norm": 0.3, "accumulate": 2}, sgd, mean),
    "weighted": ({}, sgd, weighted),
    "weighted windows": ({"accumulate": 3, "clip_norm": 0.3}, adamw, weighted),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", PLANS)
def test_a_stage_trains_as_ddp_does(pair, name, stage):
    fields, optimizer, loss = PLANS[name]
    wanted = pair.run(outcome, fx.Plan(**fields), optimizer, loss)
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage), **fields)
    same(pair.run(outcome, plan, optimizer, loss), wanted)
