"""The record of a micro-batch: what `run` and `sync` of a strategy get, and where hooks find it."""

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
from fxtrain.backends import built_in
from fxtrain.ops.placeholders import runs_placeholders

ROWS = torch.linspace(-1, 1, 10)[:, None]


def _model(ctx, **fields):
    """A model, and the records that its strategy got, by the name of the function."""
    plan = fx.Plan(strategy=fx.Single() if ctx.world_size == 1 else fx.DDP(), **fields)
    entry = built_in(type(plan.strategy))
    seen = {"run": [], "sync": []}

    def run(model, micro_batch, compute_loss):
        seen["run"].append(micro_batch)
        return entry.run(model, micro_batch, compute_loss)

    def sync(model, micro_batch):
        seen["sync"].append(micro_batch)
        return entry.sync(model, micro_batch)

    model = fx.wrap(
        nn.Linear(1, 1),
        ctx,
        plan,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        strategy=attrs.evolve(entry, run=run, sync=sync),
    )
    return model, seen


def _batches(ctx, model, rows=10, size=2):
    return list(fx.shard(DataLoader(ROWS[:rows], batch_size=size), ctx, model.plan))


def _loss(model, batch):
    return model(batch.data).square().mean()


@pytest.mark.parametrize("sync_each", [False, True])
def test_a_step_says_what_its_micro_batch_is(ctx, sync_each):
    model, seen = _model(ctx, accumulate=2, sync_each=sync_each)
    batches = _batches(ctx, model)
    for batch in batches:
        fx.step(ctx, batch, fx.StepFns(model, _loss))
    closes = [False, True, False, True, True]  # the last window has one
    assert seen["run"] == seen["sync"]
    assert [each.batch for each in seen["run"]] == batches
    assert [each.closes for each in seen["run"]] == closes
    assert [each.reduces for each in seen["run"]] == [sync_each or each for each in closes]
    assert all(each.has_rows and not each.nested for each in seen["run"])


def test_so_does_a_loop_of_parts(ctx):
    model, seen = _model(ctx, accumulate=2)
    first, second, *_ = _batches(ctx, model)
    ops.backward(_loss(model, first), model, first)
    ops.apply(model)
    with ops.sync(model, second, enabled=False):
        ops.backward(_loss(model, second), model)
        assert model.window.closes  # another loss of it does not count
        ops.backward(_loss(model, second), model)
    ops.backward(_loss(model, second), model, second)
    known = [(each.batch, each.closes, each.reduces, each.nested) for each in seen["run"]]
    assert known == [
        (first, False, False, False),
        (second, True, False, True),
        (second, True, False, True),
        (second, True, True, False),
    ]
    # The block entered the strategy's, and a backward inside it did not again.
    assert [each.batch for each in seen["sync"]] == [first, second, second]
    assert ops.apply(model).applied and not model.window.is_open


def test_a_block_inside_another_one_is_nested(ctx):
    model, seen = _model(ctx)
    with ops.sync(model), ops.sync(model, enabled=False):
        ops.backward(_loss(model, fx.batch(ROWS, ctx, model.plan)), model)
    assert [(each.reduces, each.nested) for each in seen["sync"]] == [(True, False), (False, True)]
    assert model.status.block is None


def test_hooks_find_the_micro_batch_that_runs(ctx):
    model, seen = _model(ctx)
    (batch, *_) = _batches(ctx, model)
    found = []

    def loss(model, batch):
        found.append(model.status.running)
        total = _loss(model, batch)
        total.register_hook(lambda _: found.append(model.status.running))
        return total

    fx.step(ctx, batch, fx.StepFns(model, loss))
    assert found == [*seen["run"], *seen["run"]] and model.status.running is None
    with pytest.raises(ZeroDivisionError):
        fx.step(ctx, batch, fx.StepFns(model, lambda *_: 1 / 0))
    assert model.status.running is None


def _placeholders(ctx):
    """Whether each micro-batch has rows here, and what the model says around its backward."""
    model, seen = _model(ctx, even="uneven", batch="global")
    found = []
    for batch in _batches(ctx, model, rows=3):
        with ops.sync(model, batch):
            loss = _loss(model, batch)
            found.append(runs_placeholders(model.status))
            ops.backward(loss, model)
            found.append(runs_placeholders(model.status))
        found.append(runs_placeholders(model.status))
        ops.apply(model)
    return [each.has_rows for each in seen["run"]], found


def test_a_rank_without_a_row_knows(pair):
    assert pair.run(_placeholders) == [
        ([True, True], [False] * 6),
        ([True, False], [False] * 3 + [True, True, False]),
    ]
