"""What an engine does beyond plain training: formats, offload, policies, several at once."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from tests.deepspeed._ranks import (
    adamw,
    mean,
    net,
    on_rank,
    outcome,
    rows,
    sgd,
    train,
    values,
    weighted,
)

pytestmark = pytest.mark.deepspeed

STAGES = [0, 1, 2, 3]


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


@pytest.mark.parametrize("stage", STAGES)
def test_short_windows_of_padded_weighted_rows_train_as_under_ddp(pair, stage):
    fields = {"accumulate": 3, "clip_norm": 0.3}
    wanted = pair.run(outcome, fx.Plan(**fields), adamw, weighted)
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage), **fields)
    same(pair.run(outcome, plan, adamw, weighted), wanted)


@on_rank
def _leaves_early(ctx, plan):
    """The first epoch ends inside its short window, which the second one continues."""
    model = fx.wrap(net(), ctx, plan, optimizer=adamw)
    loader = fx.shard(DataLoader(rows(40), batch_size=4), ctx, plan)
    fns = fx.StepFns(model=model, loss=mean)
    epochs = zip(loader.epochs(2), (4, 5), strict=True)
    batches = (batch for epoch, count in epochs for batch in itertools.islice(epoch, count))
    norms = [report.grad_norm for report in (fx.step(ctx, batch, fns) for batch in batches)]
    return [float(norm) for norm in norms if norm is not None], values(model)


@pytest.mark.parametrize("stage", STAGES)
def test_a_window_that_was_left_open_trains_as_under_ddp(pair, stage):
    fields = {"accumulate": 3, "clip_norm": 0.3}
    wanted = pair.run(_leaves_early, fx.Plan(**fields))
    found = pair.run(_leaves_early, fx.Plan(strategy=fx.DeepSpeed(stage=stage), **fields))
    for (norms, got), (others, parameters) in zip(found, wanted, strict=True):
        assert len(norms) == 3 and norms == pytest.approx(others, rel=1e-4)
        torch.testing.assert_close(got, parameters, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_weights_follow_autocast_within_its_rounding(pair, stage):
    fields = {"precision": "bf16", "accumulate": 2, "clip_norm": 1.0}
    wanted = pair.run(outcome, fx.Plan(**fields), adamw)
    got = pair.run(outcome, fx.Plan(strategy=fx.DeepSpeed(stage=stage), **fields), adamw)
    same(got, wanted, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("stage", STAGES)
def test_four_ranks_give_the_training_of_two(clusters, pair, stage):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage), batch="global", accumulate=2)
    wanted = pair.run(outcome, fx.Plan(batch="global", accumulate=2), adamw, mean, 4, 32)[0][3]
    for _, _, _, got in clusters[4].run(outcome, plan, adamw, mean, 4, 32):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


OFFLOADED = {
    "optimizer at 1": fx.DeepSpeed(stage=1, offload_optimizer="cpu"),
    "optimizer at 2": fx.DeepSpeed(stage=2, offload_optimizer="cpu"),
    "optimizer at 3": fx.DeepSpeed(stage=3, offload_optimizer="cpu"),
    "both": fx.DeepSpeed(stage=3, offload_optimizer="cpu", offload_parameters="cpu"),
    "by torch": fx.DeepSpeed(stage=2, offload_optimizer="cpu", cpu_optimizer="torch"),
}


@pytest.mark.parametrize("name", OFFLOADED)
def test_offloading_changes_where_and_not_what(pair, name):
    fields = {"accumulate": 2, "clip_norm": 0.3}
    wanted = pair.run(outcome, fx.Plan(**fields), adamw)
    got = pair.run(outcome, fx.Plan(strategy=OFFLOADED[name], **fields), adamw)
    same(got, wanted, rtol=1e-4, atol=1e-5)


@on_rank
def _with_a_bad_loss(ctx, plan, where):
    def loss(model, batch):
        bad = ctx.rank == ctx.world_size - 1 and batch.position.updates == 2
        value = mean(model, batch)
        if not bad:
            return value
        return value * float("nan") if where == "gradient" else value + float("inf")

    model, reports = train(ctx, plan, adamw, loss, epochs=1)
    return [(bool(r.applied), bool(r.skipped)) for r in reports], values(model)


@pytest.mark.parametrize("stage", STAGES)
def test_an_update_with_a_non_finite_loss_is_left_out(pair, stage):
    plan = fx.Plan(nonfinite="skip", accumulate=2)
    wanted = pair.run(_with_a_bad_loss, plan, "loss")
    spread = fx.Plan(strategy=fx.DeepSpeed(stage=stage), nonfinite="skip", accumulate=2)
    for (steps, got), (known, exact) in zip(
        pair.run(_with_a_bad_loss, spread, "loss"), wanted, strict=True
    ):
        assert steps == known and (False, True) in steps
        for a, b in zip(got, exact, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@on_rank
def _message(ctx, plan):
    try:
        _with_a_bad_loss(ctx, plan, "gradient")
    except fx.errors.StepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", STAGES)
def test_non_finite_values_raise_on_every_rank(pair, stage):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage), nonfinite="raise")
    for message in pair.run(_message, plan):
        assert "before update 2" in message and "rank 1" in message


@on_rank
def _managed(ctx, stage):
    config = {"managed_gradient_accumulation": True}
    plans = [
        fx.Plan(strategy=fx.DeepSpeed(stage=stage, config=extra), accumulate=3, clip_norm=0.3)
        for extra in ({}, config)
    ]
    found = []
    for plan in plans:
        model, reports = train(ctx, plan, adamw)
        found.append(([bool(r.applied) for r in reports], values(model)))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_that_counts_micro_batches_itself_does_the_same(pair, stage):
    for (steps, got), (known, wanted) in pair.run(_managed, stage):
        assert steps == known
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@on_rank
def _distilled(ctx):
    """A student at stage 2, a frozen teacher at stage 3, a second trained model at stage 3."""
    teacher = fx.wrap(net(), ctx, fx.Plan(strategy=fx.DeepSpeed(stage=3), precision="bf16"))
    student = fx.wrap(net(), ctx, fx.Plan(strategy=fx.DeepSpeed(stage=2)), optimizer=sgd)
    other_plan = fx.Plan(strategy=fx.DeepSpeed(stage=3), accumulate=2, clip_norm=0.1)
    other = fx.wrap(net(), ctx, other_plan, optimizer=adamw)

    def follow(model, batch):
        with torch.no_grad():
            goal = teacher(batch[0]).float()
        return (model(batch[0]) - goal * 0.5).square().mean()

    from torch.utils.data import DataLoader

    models, losses = (student, other), (follow, mean)
    loaders = [fx.shard(DataLoader(rows(32), batch_size=4), ctx, m.plan) for m in models]
    fns = [fx.StepFns(model=m, loss=f) for m, f in zip(models, losses, strict=True)]
    applied = [
        tuple(bool(fx.step(ctx, b, f).applied) for b, f in zip(batches, fns, strict=True))
        for batches in zip(*loaders, strict=True)
    ]
    alone, _ = train(ctx, other_plan, adamw, epochs=1, n=32)
    before = [p.detach().clone() for p in net().parameters()]
    kept = all(
        torch.equal(a, b.bfloat16().float()) for a, b in zip(values(teacher), before, strict=True)
    )
    moved = not any(torch.equal(a, b) for a, b in zip(values(student), before, strict=True))
    pairs = zip(values(alone), values(other), strict=True)
    return applied, kept, moved, all(torch.equal(a, b) for a, b in pairs)


def test_several_engines_do_not_see_each_other(pair):
    for applied, kept, moved, alike in pair.run(_distilled):
        assert applied == [(True, False), (True, True)] * 2
        assert kept and moved and alike


@on_rank
def _inference(ctx, stage):
    torch.manual_seed(ctx.rank)  # rank 0's values count
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16))
    module[1].running_mean.fill_(ctx.rank + 1.0)
    model = fx.wrap(module, ctx, fx.Plan(strategy=fx.DeepSpeed(stage=stage))).eval()
    with torch.no_grad():
        out = model(torch.ones(3, 8))
    refused = ""
    try:
        fx.ops.backward(model(torch.ones(3, 8)).sum(), model)
    except fx.errors.StepError as error:
        refused = str(error)
    return out, refused, float(module[1].running_mean[0])


@pytest.mark.parametrize("stage", STAGES)
def test_inference_needs_no_optimizer(pair, stage):
    first, second = pair.run(_inference, stage)
    assert torch.equal(first[0], second[0])
    assert "optimizer" in first[1] and first[2] == second[2] == 1.0


@on_rank
def _unwrapped(ctx, plan, optimizer):
    import copy

    module = net()
    module.double().float()
    names = {name: set(vars(part)) for name, part in module.named_modules()}
    linear = torch.nn.functional.linear
    model = fx.wrap(module, ctx, plan, optimizer=optimizer)
    inside = fx.unwrap(model)
    assert inside is module and torch.nn.functional.linear is linear
    assert {name: set(vars(part)) for name, part in module.named_modules()} == names
    copy.deepcopy(module)
    out = module(torch.ones(2, 8))  # on one rank alone, if it likes
    out.sum().backward()
    return [p.dtype for p in module.parameters()], [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("optimizer", [adamw, None], ids=["trained", "frozen"])
@pytest.mark.parametrize("stage", STAGES)
def test_unwrap_gives_a_module_in_its_own_format_back(pair, stage, optimizer):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage), precision="bf16")
    for dtypes, got in pair.run(_unwrapped, plan, optimizer):
        assert set(dtypes) == {torch.float32}
        for a, b in zip(got, net().parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@on_rank
def _dtypes_of_half(ctx, plan):
    model = fx.wrap(net().bfloat16(), ctx, plan, optimizer=adamw)
    live = {parameter.dtype for parameter in model.parameters()}
    found = {tensor.dtype for _, tensor in fx.weights(model)}
    return live, found, {parameter.dtype for parameter in fx.unwrap(model).parameters()}


@pytest.mark.parametrize(
    ("config", "live"),
    [({}, torch.bfloat16), ({"torch_autocast": {"enabled": True}}, torch.float32)],
    ids=["masters", "autocast"],
)
def test_a_model_in_bf16_trains_over_masters_or_over_fp32_parameters(pair, config, live):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=1, config=config), precision="bf16")
    for found in pair.run(_dtypes_of_half, plan):
        assert found == ({live}, {torch.bfloat16}, {torch.bfloat16})
