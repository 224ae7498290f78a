"""Dry runs know the sizes of quantised weights."""

import pytest
import torch

import fxtrain as fx
from fxtrain.precision import stored_tensors
from tests.precision._records import RECORDS, TRAINABLE, frozen_mlp, marked


def _train(plan):
    def train(ctx):
        model = fx.wrap(
            frozen_mlp(), ctx, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
        )
        fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).mean())
        loader = torch.utils.data.DataLoader(torch.ones(64, 64), batch_size=4)
        for batch in fx.shard(loader, ctx, plan):
            fx.step(ctx, batch, fns)

    return train


@pytest.mark.parametrize("name", marked(TRAINABLE))
def test_parameters_take_what_is_allocated(name):
    plan = fx.Plan(quantize=RECORDS[name])
    with fx.detect(env={}, device="cpu") as ctx:
        net = fx.wrap(frozen_mlp(), ctx, plan).module
    every = sum(one.nbytes for one in stored_tensors(net).values())
    packed = sum(one.numel() * one.element_size() for one in net.parameters())
    run = fx.dry_run(_train(plan), world=2)
    assert run.problems == ()
    # The scales of bitsandbytes are no parameters of the module.
    scales = every - packed if plan.quantize.kind != "torchao" else 0
    assert run.memory.parameters == every - scales
    assert run.memory.other >= scales
