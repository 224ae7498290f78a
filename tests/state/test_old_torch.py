"""What an older torch cannot do is a PlanError that says so, before any traffic."""

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import fxtrain as fx
from fxtrain.testing import Transformer, fake_world
from tests._errors import raises_code


def _step_of_2_9(self, *args, target=None, losses=None, **kwargs):
    """As torch 2.9 has it."""


def test_a_pipeline_needs_the_schedules_of_a_newer_torch(monkeypatch):
    monkeypatch.setattr(PipelineScheduleSingle, "step", _step_of_2_9)
    with fake_world(2, mesh=fx.Mesh(pipeline=2)) as ctx:
        with raises_code("FX202", "PP()") as error:
            fx.wrap(Transformer(), ctx, fx.Plan(strategy=fx.PP()))
        assert torch.__version__ in str(error.value) and "FSDP()" in str(error.value)
