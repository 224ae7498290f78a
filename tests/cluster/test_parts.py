"""A loop of `ops.backward` and `ops.apply`: what it does otherwise when told, and what is refused.

That it trains as `fx.step` does is a law, `parts_are_the_step`, and a property in
`property_tests/test_update.py`.
"""

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain import ops
from fxtrain.errors import StepError
from fxtrain.state import UpdateSpec
from tests._errors import raises_code

ROWS = torch.linspace(-1, 1, 8)[:, None]


def _model(ctx, **fields):
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    return fx.wrap(
        net,
        ctx,
        fx.Plan(**fields),
        optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )


def _loss(model, factor=1.0):
    """A loss whose gradient is `factor`."""
    return model(torch.full((1, 1), factor)).sum()


def _weight(model):
    return model.module.weight.item()


def test_without_batches_micro_batches_weigh_the_same(ctx):
    model = _model(ctx, accumulate=2)
    results = []
    for factor in (1.0, 3.0, 5.0):
        ops.backward(_loss(model, factor), model)
        results.append(ops.apply(model))
    assert [(one.due, one.applied) for one in results] == [(False,) * 2, (True,) * 2, (False,) * 2]
    assert _weight(model) == -2.0 and model.optimizer.param_groups[0]["lr"] == 0.5
    assert ops.apply(model, now=True).applied  # a last short window is the mean of what it has
    assert _weight(model) == -2.0 - 0.5 * 5.0


def test_an_apply_after_each_window_is_enough(ctx):
    model = _model(ctx, accumulate=2)
    for factor in (1.0, 3.0):
        ops.backward(_loss(model, factor), model)
    assert ops.apply(model).applied and _weight(model) == -2.0


def test_another_loss_of_a_micro_batch_is_added_to_it(ctx):
    model = _model(ctx, accumulate=2)
    for rows in (ROWS[:4], ROWS[4:]):
        batch = fx.batch(rows, ctx, model.plan)
        for factor in (1.0, 3.0):
            ops.backward(_loss(model, factor), model, batch)
        with ops.sync(model, batch):
            ops.backward(_loss(model, 2.0), model)
        result = ops.apply(model)
    assert result.applied and _weight(model) == -6.0


def test_a_loss_that_does_not_count_is_added_as_it_is(ctx):
    model = _model(ctx, accumulate=2)
    ops.backward(_loss(model, 10.0), model, counts=False)
    for factor in (1.0, 3.0):
        ops.backward(_loss(model, factor), model)
        ops.apply(model)
    assert _weight(model) == -12.0


def test_an_update_is_told_otherwise_by_arguments(ctx):
    model = _model(ctx, clip_norm=0.5, nonfinite="skip")
    ops.backward(_loss(model, 4.0), model)
    result = ops.apply(model, UpdateSpec(), advance=False, zero=False)
    assert result.applied and result.grad_norm is None
    assert _weight(model) == -4.0 and model.optimizer.param_groups[0]["lr"] == 1.0
    assert model.module.weight.grad.item() == 4.0  # for reading
    ops.backward(_loss(model, 2.0), model)
    assert model.module.weight.grad.item() == 2.0
    result = ops.apply(model, zero=False)
    assert result.grad_norm.item() == 2.0
    assert model.module.weight.grad.item() == pytest.approx(0.5)
    ops.backward(_loss(model, torch.nan), model)
    assert not ops.apply(model).applied
    assert _weight(model) == pytest.approx(-4.5)
    ops.backward(_loss(model, torch.nan), model)
    assert ops.apply(model, UpdateSpec(scale=2.0)).applied and _weight(model) != _weight(model)


def _clipped(ctx, by_hand):
    """Norms and weights of windows of unequal weights, clipped by the plan or between the parts."""
    fields = {} if by_hand else {"clip_norm": 0.25, "clip_value": 0.2}
    model = _model(ctx, accumulate=2, **fields)
    loader = fx.shard(torch.utils.data.DataLoader(ROWS[:7], batch_size=1), ctx, model.plan)
    found = []
    for epoch in loader.epochs(2):
        weighted = epoch.number == 1
        for batch in epoch:
            loss = _loss(model, 2.0 + batch.position.index)
            if weighted:
                loss = fx.Weighted(loss, 3.0 * batch.position.index)
            ops.backward(loss, model, batch)
            norm = None
            if by_hand and model.window.closes:
                norm = ops.clip_norm(model, 0.25)
                ops.clip_value(model, 0.2)
            result = ops.apply(model)
            if result.due:
                found.append(float(norm if by_hand else result.grad_norm))
    return found, _weight(model)


@pytest.mark.parametrize("n", [1, 2])
def test_clipping_between_the_parts_is_clipping_by_the_plan(clusters, n):
    planned = clusters[n].run(_clipped, False)
    for (norms, weight), (by_hand, other) in zip(
        planned, clusters[n].run(_clipped, True), strict=True
    ):
        assert by_hand == pytest.approx(norms, rel=1e-6) and len(norms) > 3
        assert other == pytest.approx(weight, rel=1e-6)


def _now(ctx):
    """The weight after a window that is closed early; the error where it is not reduced."""
    model = _model(ctx, accumulate=4)
    ops.backward(_loss(model, 1.0 + ctx.rank), model)
    ops.apply(model)
    with pytest.raises(StepError) as found:
        ops.apply(model, now=True)
    with ops.sync(model, enabled=True):
        ops.backward(_loss(model, 3.0 + ctx.rank), model)
    ops.apply(model, now=True)
    return _weight(model), str(found.value)


def test_a_window_that_is_closed_early_has_to_be_reduced(pair):
    for weight, error in pair.run(_now):
        assert weight == -2.5
        assert "not reduced over ranks" in error and "enabled=True" in error


WRONG = {
    "no apply": (
        {"accumulate": 2},
        lambda model, batch: [ops.backward(_loss(model), model) for _ in range(3)],
        r"window is complete, with 2 micro-batches, and ops\.apply was not called",
    ),
    "two weighted": (
        {"accumulate": 2},
        lambda model, batch: [
            ops.backward(fx.Weighted(_loss(model), 1), model, batch) for _ in range(2)
        ],
        "a second loss of one micro-batch as Weighted",
    ),
    "weighted, which does not count": (
        {},
        lambda model, batch: ops.backward(fx.Weighted(_loss(model), 1), model, counts=False),
        "takes a scalar tensor, found Weighted",
    ),
    "rows of no batch": (
        {"schedule": "samples"},
        lambda model, batch: ops.backward(_loss(model), model),
        r"by what a batch says.*ops\.backward\(loss, model, batch\)",
    ),
    "half precision": (
        {"precision": "bf16"},
        lambda model, batch: ops.backward(model(ROWS).mean(), model),
        r"^ops\.backward: the loss is torch\.bfloat16",
    ),
    "another model": (
        {},
        lambda model, batch: ops.backward(nn.Linear(1, 1)(ROWS).mean(), model),
        "does not depend on a parameter of this Linear",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(ctx, name):
    fields, call, words = WRONG[name]
    model = _model(ctx, **fields)
    with pytest.raises(StepError, match=words):
        call(model, fx.batch(ROWS, ctx, model.plan))


def test_a_block_and_what_is_in_it_have_one_batch(ctx):
    model = _model(ctx, accumulate=2)
    one, other = (fx.batch(rows, ctx, model.plan) for rows in (ROWS[:4], ROWS[4:]))
    with ops.sync(model, one), raises_code("FX500", "ops.sync"):
        ops.backward(_loss(model), model, other)
    fns = fx.StepFns(model, lambda model, _: _loss(model))
    with ops.sync(model), raises_code("FX500", "fx.ops.sync(model, batch)"):
        fx.step(ctx, one, fns)
    with ops.sync(model, one):
        assert not fx.step(ctx, one, fns).applied
    with ops.sync(model, other):
        assert fx.update(ctx, other, model, _loss(model)).applied
    assert _weight(model) == -1.0
