"""Plans, models and loaders that differ between ranks are an error on all of them."""

import itertools

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.ops.transport.exchange import CallState
from fxtrain.state.context import with_plan
from tests._slow import slow_after

SGD = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731

# One change of each field, and the path under which it is shown.
CHANGES = {
    "strategy": fx.FSDP(),
    "strategy.bucket_mib": fx.DDP(bucket_mib=3),
    "precision.compute": "bf16",
    "accumulate": 2,
    "flush": False,
    "sync_each": True,
    "clip_norm": 0.01,
    "clip_value": 0.01,
    "nonfinite": "skip",
    "schedule": "samples",
    "weigh_by": "batches",
    "batch": "global",
    "even": "drop",
    "data.source": fx.Data(source="dispatch"),
    "seed": 1,
    "recompute": ("Linear",),
    "compile": fx.Compile(backend="eager"),
    "context": fx.CP(),
    "local": fx.LocalSGD(every=2),
    "profile": fx.Profile(),
}


def _changed(path):
    return attrs.evolve(fx.Plan(), **{path.partition(".")[0]: CHANGES[path]})


def _refusals(ctx, pairs):
    """What wrap says to each pair of plans, one for each rank."""
    found = []
    for plans in pairs:
        try:
            fx.wrap(nn.Linear(2, 2), ctx, plans[ctx.rank], optimizer=SGD)
            found.append((None, ""))
        except fx.FxError as error:
            found.append((type(error), str(error)))
    return found


def test_plans_that_differ_are_an_error_everywhere(pair):
    changed = [_changed(path) for path in CHANGES]
    pairs = [*((fx.Plan(), one) for one in changed), *itertools.pairwise(changed)]
    for refusals in pair.run(_refusals, pairs):
        for (left, right), (kind, text) in zip(pairs, refusals, strict=True):
            assert kind is fx.PlanError
            for change in fx.diff(left, right):
                assert f"{change.path} is {change.right!r} instead of {change.left!r}" in text


def test_equal_plans_that_cannot_be_carried_out_are_refused_for_what_they_are(pair):
    plans = [fx.Plan(recompute=("Blok",)), fx.Plan(context=fx.CP(), strategy=fx.PP())]
    for refusals in pair.run(_refusals, [(plan, plan) for plan in plans]):
        for kind, text in refusals:
            assert kind is fx.PlanError and "different plans" not in text


def _wrap(ctx, plans):
    fx.wrap(nn.Linear(2, 2), ctx, plans[ctx.rank], optimizer=SGD)


@attrs.frozen
class _Odd:
    """A third party's config that no file could hold."""

    call: object = print
    kind: str = "odd"


@pytest.mark.slow
def test_ranks_with_one_plan_are_named_together(clusters):
    plans = [fx.Plan(), fx.Plan(seed=1), fx.Plan(seed=1), fx.Plan(strategy=_Odd())]
    for error in clusters[4].outcomes(_wrap, plans):
        assert isinstance(error, fx.PlanError)
        assert "ranks 1-2: seed is 1 instead of 0" in str(error)
        assert "rank 3: strategy" in str(error)


def _what_differs(ctx, what):
    mine = ctx.rank == 1
    net = nn.Linear(2, 3 if what == "model" and mine else 2)
    fx.wrap(net, ctx, optimizer=None if what == "optimizer" and mine else SGD)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_what_ranks_bring_beside_the_plan_is_compared(pair, what):
    for error in pair.outcomes(_what_differs, what):
        assert isinstance(error, fx.CollectiveError)
        assert f"the ranks differ in {what}." in str(error)


def _exchanges(ctx, plan):
    before = ctx.comm.slot(CallState).count
    fx.wrap(nn.Linear(2, 2), ctx, plan, optimizer=SGD)
    return ctx.comm.slot(CallState).count - before


def test_ddp_is_wrapped_with_four_exchanges(clusters):
    """Of plan and model, of models on the meta device, of options of optimizers, and of values."""
    assert clusters[2].run(_exchanges, fx.Plan()) == [4, 4]
    assert clusters[1].run(_exchanges, fx.Plan()) == [0]


def _iterate(ctx, source, changes):
    plan = fx.Plan(data=fx.Data(source=source), **changes[ctx.rank])
    loader = fx.shard(DataLoader(torch.arange(8), batch_size=2), ctx, plan)
    return [batch.data.tolist() for batch in loader]


@pytest.mark.parametrize("source", slow_after(1, ["shard", "dispatch", "sharded"]))
def test_loaders_under_different_plans_are_an_error_everywhere(pair, source):
    for error in pair.outcomes(_iterate, source, [{}, {"accumulate": 2}]):
        assert isinstance(error, fx.PlanError)
        assert "rank 1: accumulate is 2 instead of 1" in str(error)
    assert len(pair.run(_iterate, source, [{"accumulate": 2}] * 2)) == 2


# The loader splits sequences, and a step relies on it.
SHARED = ("context",)


def _step_between(ctx, wrapped, sharded):
    """What a step says to a model and a batch under two plans; its update otherwise."""
    net = nn.Linear(2, 2)
    model = fx.wrap(net, ctx, wrapped, optimizer=SGD)
    before = net.weight.detach().clone()
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    batch = next(iter(fx.shard(DataLoader(torch.ones(8, 2), batch_size=2), ctx, sharded)))
    try:
        return fx.step(ctx, batch, fns).applied
    except fx.errors.StepError as error:
        assert torch.equal(net.weight, before) and net.weight.grad is None
        return str(error)


@pytest.mark.parametrize("path", [path for path in CHANGES if path not in ("strategy", "local")])
def test_a_step_refuses_a_batch_of_another_plan_where_both_rely_on_it(path):
    plain, changed = fx.Plan(), _changed(path)
    with fx.detect(env={}, device="cpu") as ctx:
        said = _step_between(ctx, plain, changed)
        if path not in SHARED:
            assert said is True
            return
        left, right = getattr(plain, path), getattr(changed, path)
        for text, model, loader in (
            (said, left, right),
            (_step_between(ctx, changed, plain), right, left),
        ):
            assert f"{path} is {model!r} in fx.wrap and {loader!r} in fx.shard" in text
            assert "the same plan" in text


def test_all_ranks_refuse_a_batch_of_another_plan(pair):
    said = pair.run(_step_between, fx.Plan(clip_norm=1.0), fx.Plan(context=fx.CP()))
    assert said[0] == said[1] and "context is None in fx.wrap and CP(" in said[0]


def test_equal_plans_need_not_be_one_object():
    with fx.detect(env={}, device="cpu") as ctx:
        assert _step_between(ctx, fx.Plan(clip_norm=2.0), fx.Plan(clip_norm=2.0)) is True
        given = with_plan(ctx, fx.Plan(accumulate=2), ())
        assert _step_between(given, None, fx.Plan(accumulate=2)) is False


def _with_own_options(ctx, name):
    """What wrap says where an option of the optimizer or scheduler depends on the rank."""
    own = 0.1 + 0.1 * ctx.rank
    lr, gamma = (own, 0.9) if name == "lr" else (0.1, own)
    net = nn.Linear(2, 2)
    try:
        fx.wrap(
            net,
            ctx,
            optimizer=lambda params: torch.optim.SGD(params, lr=lr),
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma),
        )
    except fx.CollectiveError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "where"), [("lr", "SGD 0, group 0: lr"), ("gamma", "gamma")])
def test_options_of_optimizers_that_differ_are_an_error_everywhere(pair, name, where):
    for text in pair.run(_with_own_options, name):
        assert f"{where}: 0.1" in text and f"{where}: 0.2" in text
