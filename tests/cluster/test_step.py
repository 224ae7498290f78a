"""Training on real ranks: precision, hooks, policies, several optimizers, bad input."""

import re
from contextlib import nullcontext

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
from tests._slow import slow_after
from tests.cluster._small_nets import SGD, small_data, small_net, square_loss, train_small
from tests.cluster._timeouts import shortened


def _curve(ctx, plan):
    model, reports = train_small(ctx, plan)
    return [float(r.loss) for r in reports], [p.detach() for p in model.parameters()]


PLANS = {
    "bucket view off": fx.Plan(strategy=fx.DDP(bucket_view=False)),
    "small buckets": fx.Plan(strategy=fx.DDP(bucket_mib=0.0001)),
    "static graph": fx.Plan(strategy=fx.DDP(static_graph=True)),
    "static graph, sync_each": fx.Plan(
        strategy=fx.DDP(static_graph=True), accumulate=2, sync_each=True
    ),
    "unused parameters": fx.Plan(strategy=fx.DDP(unused_parameters=True)),
    "recompute": fx.Plan(recompute=("Block",)),
    "compile": fx.Plan(compile=fx.Compile(backend="eager")),
    "compile blocks": fx.Plan(compile=fx.Compile(backend="eager", blocks=("Block",))),
    "recompute and compile": fx.Plan(
        recompute=("Block",), compile=fx.Compile(backend="eager", blocks=("Block",))
    ),
}


@pytest.mark.parametrize("name", slow_after(7, PLANS))
def test_how_a_plan_is_carried_out_does_not_change_the_result(pair, name):
    plan = PLANS[name]
    plain = fx.Plan(accumulate=plan.accumulate)
    wanted, got = pair.run(_curve, plain), pair.run(_curve, plan)
    for (_, mine), (_, theirs) in zip(got, wanted, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


HOOKS = {
    "fp16": fx.CommHook(name="fp16"),
    "bf16": fx.CommHook(name="bf16"),
    "power_sgd": fx.CommHook(name="power_sgd", power_sgd=fx.PowerSGD(start_iter=2)),
    "batched_power_sgd": fx.CommHook(
        name="batched_power_sgd", power_sgd=fx.PowerSGD(start_iter=2, rank=2)
    ),
    "power_sgd over bf16": fx.CommHook(
        name="power_sgd", wrapper="bf16", power_sgd=fx.PowerSGD(start_iter=2)
    ),
    "power_sgd over fp16": fx.CommHook(
        name="power_sgd", wrapper="fp16", power_sgd=fx.PowerSGD(start_iter=2)
    ),
}


@pytest.mark.parametrize("name", slow_after(2, HOOKS))
def test_communication_hooks_train(pair, name):
    results = pair.outcomes(_curve, fx.Plan(strategy=fx.DDP(hook=HOOKS[name])))
    if any(isinstance(result, Exception) for result in results):
        words = "NCCL and XCCL only" if "bf16" in name else "fails on every gradient"
        assert "bf16" in name or name == "batched_power_sgd"
        assert all(type(error) is fx.PlanError and words in str(error) for error in results)
        return
    plain = pair.run(_curve, fx.Plan())
    for (losses, params), (_, exact) in zip(results, plain, strict=True):
        assert sum(losses[4:]) < sum(losses[:4])
        assert any(not torch.equal(a, b) for a, b in zip(params, exact, strict=True))
        for a, b in zip(params, results[0][1], strict=True):
            assert torch.equal(a, b)


def _by_precision(ctx, compute):
    model, reports = train_small(ctx, fx.Plan(precision=compute, clip_norm=1.0), epochs=4)
    out = model(torch.ones(1, 8))
    wide = fx.Precision(compute=compute, output="fp32")
    other = fx.wrap(small_net(), ctx, fx.Plan(precision=wide))
    return (
        [float(r.loss) for r in reports],
        str(out.dtype),
        str(other(torch.ones(1, 8)).dtype),
        [bool(r.skipped) for r in reports],
    )


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_every_precision_trains_and_keeps_its_dtype(pair, compute):
    dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[compute]
    for losses, out, wide, _ in pair.run(_by_precision, compute):
        assert sum(losses[-4:]) < sum(losses[:4])
        assert out == f"torch.{dtype}" and wide == "torch.float32"


def _overflow(ctx):
    plan = fx.Plan(precision=fx.Precision(compute="fp16", scale=fx.LossScale(initial=2.0**16)))

    def exploding(model, batch):
        factor = 1e38 if ctx.rank == 1 and batch.position.updates == 2 else 1.0
        return square_loss(model, batch) * factor

    def optimizers(params):
        return [torch.optim.SGD(params[:2], lr=0.1), torch.optim.SGD(params[2:], lr=0.1)]

    def halve(optimizers):
        return [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]

    model, reports = train_small(ctx, plan, optimizers, halve, epochs=1, loss=exploding)
    rates = [one["lr"] for opt in model.optimizers for one in opt.param_groups]
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return [(r.applied, r.skipped) for r in reports], model.scaler.get_scale(), rates, finite


def test_an_overflow_on_one_rank_skips_the_step_of_all_optimizers_everywhere(pair):
    for steps, scale, rates, finite in pair.run(_overflow):
        assert steps == [(True, False), (False, True), (True, False), (True, False)]
        assert scale == 2.0**15  # one update of the scale for two optimizers
        assert rates == [0.1 / 8] * 2  # a skipped update advances no scheduler
        assert finite


def _nonfinite(ctx, policy):
    def loss(model, batch):
        bad = ctx.rank == 1 and batch.position.updates == 2
        return square_loss(model, batch) * (float("nan") if bad else 1.0)

    model, reports = train_small(ctx, fx.Plan(nonfinite=policy), epochs=1, loss=loss)
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return [(r.applied, r.skipped) for r in reports], finite


def test_non_finite_values_are_ignored_if_asked(pair):
    assert all(not finite for _, finite in pair.run(_nonfinite, "ignore"))


def test_non_finite_values_raise_everywhere(pair):
    for error in pair.outcomes(_nonfinite, "raise"):
        assert isinstance(error, fx.errors.StepError)
        assert "update 2" in str(error) and "rank 1: 1 non-finite loss;" in str(error)


def _aux(ctx):
    def loss(model, batch):
        value = square_loss(model, batch)
        return value, {"double": value * 2, "rows": len(batch[1])}

    _, reports = train_small(ctx, fx.Plan(), epochs=1, loss=loss)
    aux = reports[0].aux
    return float(aux["double"]) == 2 * float(reports[0].loss), aux["double"].requires_grad


def test_aux_metrics_come_back_detached(pair):
    assert pair.run(_aux) == [(True, False)] * 2


def _several_models(ctx):
    """Two trained models and a frozen one, each with its own plan, interleaved."""
    teacher = fx.wrap(small_net(), ctx, fx.Plan(precision="bf16"))
    one = fx.wrap(small_net(), ctx, fx.Plan(accumulate=2), optimizer=SGD)
    two = fx.wrap(small_net(), ctx, fx.Plan(clip_norm=0.1), optimizer=SGD)
    loaders = [fx.shard(DataLoader(small_data(), batch_size=4), ctx, m.plan) for m in (one, two)]
    fns = [fx.StepFns(model=m, loss=square_loss) for m in (one, two)]
    pairs = zip(*loaders, strict=True)
    applied = [
        tuple(fx.step(ctx, b, f).applied for b, f in zip(batches, fns, strict=True))
        for batches in pairs
    ]
    alone, _ = train_small(ctx, fx.Plan(accumulate=2), epochs=1)
    same = all(torch.equal(a, b) for a, b in zip(alone.parameters(), one.parameters(), strict=True))
    return applied, same, str(teacher(torch.ones(1, 8)).dtype)


def test_models_and_plans_do_not_see_each_other(pair):
    for applied, same, dtype in pair.run(_several_models):
        assert applied == [(False, True), (True, True)] * 2
        assert same and dtype == "torch.bfloat16"


def _frozen(ctx):
    net = small_net().requires_grad_(False)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(ctx.rank + 1.0)
    model = fx.wrap(net, ctx)
    return [float(p.mean()) for p in model.parameters()]


def test_a_frozen_model_gets_the_values_of_rank_0(cluster):
    assert cluster.run(_frozen) == [[1.0] * 6] * cluster.n


def _lost_in_backward(ctx):
    model = fx.wrap(small_net(), ctx, optimizer=SGD)
    fns = fx.StepFns(model=model, loss=square_loss)
    for batch in fx.shard(DataLoader(small_data(), batch_size=4), ctx):
        last = batch.position.updates == 2
        if last and ctx.rank == 1:
            return "left the loop"
        with shortened(ctx) if last else nullcontext():
            fx.step(ctx, batch, fns)
    return None


def test_a_rank_that_leaves_the_loop_is_named(pair):
    first, second = pair.outcomes(_lost_in_backward)
    assert isinstance(first, fx.CollectiveError) and second == "left the loop"
    assert "step" in str(first) and "rank 1: never joined" in str(first)
    assert not re.search(r"waited 0 s|failed after", str(first))  # the step does not measure it


def _gathers_in_place_of_a_step(ctx):
    fns = fx.StepFns(
        model=fx.wrap(small_net(), ctx, optimizer=SGD),
        loss=lambda model, batch: fx.Weighted(square_loss(model, batch), 4),
    )
    batch = next(iter(fx.shard(DataLoader(small_data(), batch_size=4), ctx)))
    with shortened(ctx):
        return ops.gather(1, ctx) if ctx.rank else fx.step(ctx, batch, fns)


def test_weights_do_not_mix_with_another_call(pair):
    """They are not compared: both ranks wait, and say where each of them did."""
    errors = pair.outcomes(_gathers_in_place_of_a_step)
    for rank, (error, call) in enumerate(zip(errors, ["step", "gather"], strict=True)):
        assert isinstance(error, fx.CollectiveError) and error.code == "FX302"
        assert re.search(rf"rank {rank}: waited .* in {call} at", str(error))


def _unreduced(ctx):
    model = fx.wrap(small_net(), ctx, fx.Plan(strategy=fx.DDP(static_graph=True)))
    with ops.sync(model, enabled=False):
        pass


def test_a_static_graph_has_no_backward_without_a_reduction(pair):
    for error in pair.outcomes(_unreduced):
        assert isinstance(error, fx.errors.StepError) and "Use static_graph=False" in str(error)


def test_eval_and_train_modes(ctx):
    model = fx.wrap(small_net(), ctx)
    assert model.eval().module.training is False and model.train().module.training is True


def test_seeds_per_rank(ctx):
    import attrs

    other = attrs.evolve(ctx, rank=1, world_size=2)
    draws = []
    for one in (ctx, other):
        for per_rank in (False, True):
            ops.seed(5, one, per_rank=per_rank)
            draws.append(float(torch.rand(1)))
    assert draws[0] == draws[1] == draws[2] != draws[3]
