"""Experts over data ranks: what is sent and held, checkpoints, transformers, and refusals."""

import itertools

import pytest
import torch

import fxtrain as fx
from fxtrain.testing import count_collectives, fake_world
from property_tests.test_experts import WIDTH, Block
from tests.cluster.test_tensor import by_hand, train

SPREAD = fx.Plan(strategy=fx.FSDP(expert=2), clip_norm=0.5)
PLANS = {
    "spread": SPREAD,
    "sharded": fx.Plan(strategy=fx.FSDP(), clip_norm=0.5),
    "replicas": fx.Plan(clip_norm=0.5),
}


def _net():
    torch.manual_seed(0)
    return Block(4, 2, 0.0)


def _wrap(ctx, plan):
    return fx.wrap(_net(), ctx, plan, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))


def _update(ctx, model, number):
    rows = torch.linspace(-1, 1, 8 * 3 * WIDTH).view(8, 3, WIDTH) * (number + 1)
    held = 8 // ctx.world_size
    mine = rows[ctx.rank * held : (ctx.rank + 1) * held].contiguous()
    batch = fx.batch(mine, ctx, model.plan)
    return fx.update(ctx, batch, model, model(mine).float().square().mean()).position


def _counted(ctx, precision):
    plan = fx.Plan(strategy=fx.FSDP(expert=2), precision=precision)
    model = _wrap(ctx, plan)
    with count_collectives() as traffic:
        _update(ctx, model, 0)
    held = {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
    return traffic.counts, held["experts.weight"], {p.dtype for p in model.parameters()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_tokens_travel_and_experts_stay(pair, precision):
    for counts, held, dtypes in pair.run(_counted, precision):
        # How many tokens, the tokens, the outputs; and in backward the gradients of the outputs,
        # since the tokens are data here.
        assert counts["all_to_all"] == 4
        assert held == (2, WIDTH, WIDTH)
        assert dtypes == {torch.float32}


def _resumed(ctx, plan, folder, start, stop):
    model, position = _wrap(ctx, plan), None
    if start:
        fx.restore(folder, ctx, model)
    for number in range(start, stop):
        position = _update(ctx, model, number)
    if not start:
        fx.save(folder, ctx, model, position=position)
    return {name: value.clone() for name, value in fx.weights(model)}


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(PLANS, 2)])
def test_checkpoints_are_resharded(pair, tmp_path, before, after):
    wanted = pair.run(_resumed, PLANS["sharded"], str(tmp_path / "whole"), 0, 4)[0]
    folder = str(tmp_path / "run")
    pair.run(_resumed, PLANS[before], folder, 0, 2)
    for weights in pair.run(_resumed, PLANS[after], folder, 2, 4):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


def _unwrapped(ctx):
    model = _wrap(ctx, SPREAD)
    before = _net()
    with fx.gathered(model) as net:
        rows = torch.ones(2, 1, WIDTH)
        assert torch.equal(net(rows), before(rows))
    module = fx.unwrap(model)
    assert module.experts.num_experts == 4
    assert torch.equal(module(rows), before(rows))
    assert not module.experts._forward_hooks


def test_the_module_is_given_back(pair):
    pair.run(_unwrapped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "strategy"),
    [
        (2, fx.FSDP(expert=2)),
        (4, fx.FSDP(expert=2)),
        (4, fx.FSDP(expert=4, mode="grads_and_optimizer")),
        (4, fx.FSDP(expert=2, shard=2)),
    ],
    ids=["one group", "two groups", "one group of four", "replicas"],
)
def test_mixtral_trains_as_in_one_process(clusters, n, strategy):
    plan = fx.Plan(strategy=strategy, clip_norm=0.5)
    wanted_norms, wanted_logits, wanted = by_hand("mixtral", 0.5)
    for norms, logits, parameters in clusters[n].run(train, "mixtral", fx.Mesh(), plan):
        # Its router computes in fp32.
        torch.testing.assert_close(norms, wanted_norms, rtol=1e-4, atol=0)
        torch.testing.assert_close(logits, wanted_logits, rtol=1e-3, atol=1e-3)
        for key, value in wanted.items():
            torch.testing.assert_close(parameters[key], value, rtol=1e-3, atol=1e-5)


def test_a_dry_run_assumes_equal_shares():
    def loop(ctx):
        model = _wrap(ctx, fx.Plan(strategy=fx.FSDP(expert=4)))
        for _ in range(3):
            rows = torch.randn(2, 3, WIDTH)
            fx.update(ctx, fx.batch(rows, ctx, model.plan), model, model(rows).square().mean())

    found = fx.dry_run(loop, world=8)
    assert [one.count for one in found.step if one.kind == "all_to_all"] == [3]


REFUSED = {
    "experts": (fx.FSDP(expert=8), {}, 8, "has 4 experts, which 8 ranks do not divide"),
    "replica": (fx.FSDP(expert=4, shard=2), {}, 4, "multiple of 4 ranks, but one has 2"),
    "mode": (fx.FSDP(expert=2, mode="none"), {}, 2, "cannot be combined with tensor or context"),
    "local": (
        fx.FSDP(expert=2, shard=2),
        {"local": fx.LocalSGD(every=2)},
        4,
        r"combined with Plan\(local",
    ),
    "rest": (fx.FSDP(expert=4), {}, 24, "the other 6 ranks of a replica divide neither"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_spread_is_refused(name):
    strategy, options, world, text = REFUSED[name]
    with fake_world(world) as ctx, pytest.raises(fx.PlanError, match=text):
        fx.wrap(_net(), ctx, fx.Plan(strategy=strategy, **options))


def test_a_model_without_experts_is_refused():
    with fake_world(2) as ctx, pytest.raises(fx.PlanError, match="has no mixture of experts"):
        fx.wrap(torch.nn.Linear(2, 2), ctx, SPREAD)
