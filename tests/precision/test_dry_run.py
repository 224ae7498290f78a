"""Dry runs know the sizes of quantised weights."""

import pytest
import torch

import fxtrain as fx
from fxtrain.precision import stored_tensors
from tests.precision._records import RECORDS, frozen_mlp, marked


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


@pytest.mark.parametrize("name", marked(["int8", "float8"]))
def test_parameters_take_what_is_allocated(name):
    plan = fx.Plan(quantize=RECORDS[name])
    with fx.detect(env={}, device="cpu") as ctx:
        net = fx.wrap(frozen_mlp(), ctx, plan).module
    # The library's tables of a format may be the same for all layers.
    tensors = {one.data_ptr(): one.nbytes for one in stored_tensors(net).values()}
    run = fx.dry_run(_train(plan), world=2)
    assert run.problems == ()
    assert run.memory.parameters == sum(tensors.values())
