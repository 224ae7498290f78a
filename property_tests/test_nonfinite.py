"""Non-finite losses and gradients anywhere on a mesh: every rank decides as one process does."""

import math

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain.testing import Transformer
from fxtrain.testing.training import on_mesh, token_rows
from property_tests.conftest import NO_SHRINK
from tests._slow import slow_after
from tests.cluster._models import ATTENTION, DOWN, PIPELINES, UP

LAYOUTS = {
    "TP": (fx.Mesh(tensor=2), {"strategy": fx.FSDP(tensor=fx.TP(styles=(UP, DOWN, *ATTENTION)))}),
    "PP": (fx.Mesh(pipeline=2), {"strategy": fx.PP(microbatches=2)}),
    "CP": (fx.Mesh(context=2), {"context": fx.CP(tables=("position",))}),
    "FSDP": (None, {"strategy": fx.FSDP()}),
    "ZeRO-1": (None, {"strategy": fx.DDP(shard_optimizer=True)}),
}
ON_RANKS = settings(deadline=None, phases=NO_SHRINK, max_examples=2)
ROWS = 2  # of a micro-batch of all ranks
UPDATES = 4


@attrs.frozen
class Poison:
    """What is not finite.

    Attributes:
        kind: "loss", or "gradient" of one parameter on one rank only.
        at: Number of the micro-batch, from 0; a gradient is that of the end of its window, since
            shards have none before.
        rank: Of the gradient.
        value: Infinity or NaN.
        parameter: Number of the parameter, among those of the rank.
    """

    kind: str
    at: int
    rank: int
    value: float
    parameter: int


def _plan(options, policy, accumulate, clip_norm):
    return fx.Plan(
        **options, nonfinite=policy, accumulate=accumulate, clip_norm=clip_norm, batch="global"
    )


def _train(ctx, mesh, plan, poisons):
    """Weights, and what happened at each end of a window: an update, a skip, an error."""
    with on_mesh(ctx, mesh) as placed:
        net = Transformer(dtype=torch.float64)
        model = fx.wrap(net, placed, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        tokens, _ = token_rows(ROWS * UPDATES * plan.accumulate)
        rows = TensorDataset(tokens[:, :-1], tokens[:, 1:])
        loader = fx.shard(DataLoader(rows, batch_size=ROWS), placed, plan)
        step = [0]
        for parameter, one in _hooked(model, ctx.rank, poisons):
            parameter.register_post_accumulate_grad_hook(_poisoning(one, step))
        fns = fx.StepFns(model=model, loss=_poisoned_loss(poisons, step))
        ends = []
        for batch in loader:
            try:
                report = fx.step(placed, batch, fns)
            except fx.errors.StepError as error:
                ends.append(str(error))
            else:
                if report.applied or report.skipped:
                    ends.append("skipped" if report.skipped else "applied")
            step[0] += 1
        return {name: one.clone() for name, one in fx.weights(model, device="cpu")}, ends


def _poisoned_loss(poisons, step):
    def loss(model, batch):
        inputs, targets = batch.data
        value = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        for poison in poisons:
            if poison.kind == "loss" and poison.at == step[0]:
                value = value * poison.value
        return value

    return loss


def _hooked(model, rank, poisons):
    # A stage has all parameters outside of blocks, also those that only the other stage uses.
    unused = ("gain", "position")[rank] if isinstance(model.plan.strategy, fx.PP) else ""
    parameters = [one for name, one in model.module.named_parameters() if name != unused]
    for poison in poisons:
        if poison.kind == "gradient" and poison.rank == rank:
            last = poison.at // model.plan.accumulate * model.plan.accumulate
            at = last + model.plan.accumulate - 1
            yield parameters[poison.parameter % len(parameters)], attrs.evolve(poison, at=at)


def _poisoning(poison, step):
    def hook(parameter):
        if poison.at == step[0] and parameter.grad is not None:
            grad = getattr(parameter.grad, "_local_tensor", parameter.grad)
            grad.view(-1)[:1] = poison.value

    return hook


def _check(pair, layout, policy, accumulate, clip_norm, poisons):
    mesh, options = LAYOUTS[layout]
    plan = _plan(options, policy, accumulate, clip_norm)
    found = pair.run(_train, mesh, plan, poisons)
    with fx.detect(env={}, device="cpu") as ctx:
        alone = _plan({}, "skip", accumulate, clip_norm)
        plain = [attrs.evolve(one, kind="loss") for one in poisons]
        wanted, ends = _train(ctx, None, alone, plain)
    (weights, mine), (others, theirs) = found
    assert mine == theirs
    bad = "skipped" if policy == "skip" else "Non-finite values before update"
    assert [one if one == "applied" else one[: len(bad)] for one in mine] == [
        bad if one == "skipped" else one for one in ends
    ]
    for name, value in wanted.items():
        assert torch.equal(weights[name], others[name])
        torch.testing.assert_close(weights[name], value, rtol=1e-9, atol=1e-11)


def _poisons(accumulate):
    return st.lists(
        st.builds(
            Poison,
            kind=st.sampled_from(["loss", "gradient"]),
            at=st.integers(0, UPDATES * accumulate - 1),
            rank=st.integers(0, 1),
            value=st.sampled_from([math.inf, -math.inf, math.nan]),
            parameter=st.integers(0, 30),
        ),
        min_size=1,
        max_size=3,
    )


@pytest.mark.parametrize(
    "layout",
    slow_after(1, [pytest.param(one, marks=PIPELINES if one == "PP" else ()) for one in LAYOUTS]),
)
@given(data=st.data())
@ON_RANKS
def test_a_value_that_is_not_finite_anywhere_skips_the_update_everywhere(pair, layout, data):
    accumulate = data.draw(st.integers(1, 3))
    poisons = data.draw(_poisons(accumulate))
    policy = data.draw(st.sampled_from(["skip", "raise"]))
    clip_norm = data.draw(st.sampled_from([None, 0.5]))
    _check(pair, layout, policy, accumulate, clip_norm, poisons)
