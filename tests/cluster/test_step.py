"""Training on real ranks: precision, hooks, policies, several optimizers, bad input."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

SGD = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.linear(x)))


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return nn.Sequential(Block(), Block(), nn.Linear(8, 2))


def _data(n=32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 8, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())


def _loss(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def _train(ctx, plan, optimizer=SGD, scheduler=None, epochs=2, size=4, net=None, loss=_loss):
    model = fx.wrap(net or _net(), ctx, plan, optimizer=optimizer, scheduler=scheduler)
    loader = fx.shard(DataLoader(_data(), batch_size=size), ctx, plan)
    fns = fx.StepFns(model=model, loss=loss)
    reports = [fx.step(ctx, batch, fns) for epoch in loader.epochs(epochs) for batch in epoch]
    return model, reports


def _curve(ctx, plan):
    model, reports = _train(ctx, plan)
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


@pytest.mark.parametrize("name", PLANS)
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


@pytest.mark.parametrize("name", HOOKS)
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
    model, reports = _train(ctx, fx.Plan(precision=compute, clip_norm=1.0), epochs=4)
    out = model(torch.ones(1, 8))
    wide = fx.Precision(compute=compute, output="fp32")
    other = fx.wrap(_net(), ctx, fx.Plan(precision=wide))
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
        return _loss(model, batch) * factor

    def optimizers(params):
        return [torch.optim.SGD(params[:2], lr=0.1), torch.optim.SGD(params[2:], lr=0.1)]

    def halve(optimizers):
        return [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in optimizers]

    model, reports = _train(ctx, plan, optimizers, halve, epochs=1, loss=exploding)
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
        return _loss(model, batch) * (float("nan") if bad else 1.0)

    model, reports = _train(ctx, fx.Plan(nonfinite=policy), epochs=1, loss=loss)
    finite = all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return [(r.applied, r.skipped) for r in reports], finite


def test_non_finite_values_are_skipped_together(pair):
    for steps, finite in pair.run(_nonfinite, "skip"):
        assert steps[1] == (False, True) and steps[0] == steps[2] == (True, False)
        assert finite


def test_non_finite_values_are_ignored_if_asked(pair):
    assert all(not finite for _, finite in pair.run(_nonfinite, "ignore"))


def test_non_finite_values_raise_everywhere(pair):
    for error in pair.outcomes(_nonfinite, "raise"):
        assert isinstance(error, fx.StepError)
        assert "update 2" in str(error) and "rank 1: 1 non-finite loss;" in str(error)


def _clipped(ctx):
    plan = fx.Plan(clip_norm=0.01, clip_value=0.005)
    model, reports = _train(ctx, plan, epochs=1)
    return [float(r.grad_norm) for r in reports], [p.detach() for p in model.parameters()]


def test_norms_are_equal_on_every_rank(cluster):
    results = cluster.run(_clipped)
    for norms, params in results:
        assert norms == results[0][0] and norms[0] > 0.01
        assert all(torch.equal(a, b) for a, b in zip(params, results[0][1], strict=True))


def _scheduled(ctx, by):
    plan = fx.Plan(accumulate=2, schedule=by)
    seen = []

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: seen.append(n) or 1.0)

    _train(ctx, plan, scheduler=scheduler, epochs=1)
    return seen[-1]


def test_schedulers_advance_once_per_update_or_per_sample(cluster):
    updates = -(-(32 // (4 * cluster.n)) // 2)
    assert cluster.run(_scheduled, "update") == [updates] * cluster.n
    assert cluster.run(_scheduled, "samples") == [32] * cluster.n


def _aux(ctx):
    def loss(model, batch):
        value = _loss(model, batch)
        return value, {"double": value * 2, "rows": len(batch[1])}

    _, reports = _train(ctx, fx.Plan(), epochs=1, loss=loss)
    aux = reports[0].aux
    return float(aux["double"]) == 2 * float(reports[0].loss), aux["double"].requires_grad


def test_aux_metrics_come_back_detached(pair):
    assert pair.run(_aux) == [(True, False)] * 2


def _several_models(ctx):
    """Two trained models and a frozen one, each with its own plan, interleaved."""
    teacher = fx.wrap(_net(), ctx, fx.Plan(precision="bf16"))
    one = fx.wrap(_net(), ctx, fx.Plan(accumulate=2), optimizer=SGD)
    two = fx.wrap(_net(), ctx, fx.Plan(clip_norm=0.1), optimizer=SGD)
    loaders = [fx.shard(DataLoader(_data(), batch_size=4), ctx, m.plan) for m in (one, two)]
    fns = [fx.StepFns(model=m, loss=_loss) for m in (one, two)]
    pairs = zip(*loaders, strict=True)
    applied = [
        tuple(fx.step(ctx, b, f).applied for b, f in zip(batches, fns, strict=True))
        for batches in pairs
    ]
    alone, _ = _train(ctx, fx.Plan(accumulate=2), epochs=1)
    same = all(torch.equal(a, b) for a, b in zip(alone.parameters(), one.parameters(), strict=True))
    return applied, same, str(teacher(torch.ones(1, 8)).dtype)


def test_models_and_plans_do_not_see_each_other(pair):
    for applied, same, dtype in pair.run(_several_models):
        assert applied == [(False, True), (True, True)] * 2
        assert same and dtype == "torch.bfloat16"


def _frozen(ctx):
    net = _net().requires_grad_(False)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(ctx.rank + 1.0)
    model = fx.wrap(net, ctx)
    return [float(p.mean()) for p in model.parameters()]


def test_a_frozen_model_gets_the_values_of_rank_0(cluster):
    assert cluster.run(_frozen) == [[1.0] * 6] * cluster.n


def _different_models(ctx):
    fx.wrap(nn.Linear(2 + ctx.rank, 2), ctx)


def test_different_models_are_an_error_everywhere(pair):
    for error in pair.outcomes(_different_models):
        assert isinstance(error, fx.CollectiveError)
        assert "Linear with 6 parameters" in str(error) and "Linear with 8" in str(error)


def _different_data(ctx):
    loader = fx.shard(DataLoader(_data(20 + ctx.rank), batch_size=4), ctx)
    return [None for _ in loader]


def test_loaders_that_disagree_are_an_error_everywhere(pair):
    for error in pair.outcomes(_different_data):
        assert isinstance(error, fx.CollectiveError) and "rows" in str(error)


def _lost_in_backward(ctx):
    model = fx.wrap(_net(), ctx, optimizer=SGD)
    fns = fx.StepFns(model=model, loss=_loss)
    for batch in fx.shard(DataLoader(_data(), batch_size=4), ctx):
        if ctx.rank == 1 and batch.position.updates == 2:
            return "left the loop"
        fx.step(ctx, batch, fns)
    return None


def test_a_rank_that_leaves_the_loop_is_named(pair):
    first, second = pair.outcomes(_lost_in_backward)
    assert isinstance(first, fx.CollectiveError) and second == "left the loop"
    assert "step" in str(first) and "rank 1: never joined" in str(first)


@pytest.fixture
def ctx():
    with fx.detect({}, device="cpu") as found:
        yield found


def _one_batch(ctx, plan=fx.Plan()):  # noqa: B008
    return next(iter(fx.shard(DataLoader(_data(), batch_size=4), ctx, plan)))


BAD_LOSSES = {
    "shape": (lambda m, b: m(b[0]), "scalar"),
    "number": (lambda m, b: 3.0, "not a tensor"),
    "detached": (lambda m, b: _loss(m, b).detach(), "does not require grad"),
    "constant": (lambda m, b: torch.tensor(1.0), "does not require grad"),
    "weight": (lambda m, b: fx.Weighted(_loss(m, b), torch.ones(3)), "Reduce it"),
}


@pytest.mark.parametrize("name", BAD_LOSSES)
def test_a_loss_that_cannot_be_trained_on_is_refused(ctx, name):
    loss, words = BAD_LOSSES[name]
    model = fx.wrap(_net(), ctx, optimizer=SGD)
    with pytest.raises(fx.StepError, match=words):
        fx.step(ctx, _one_batch(ctx), fx.StepFns(model=model, loss=loss))


ONE_ENTRY = {
    "mean": lambda m, b: _loss(m, b),
    "weighted": lambda m, b: fx.Weighted(_loss(m, b) * 4, 4),
}


@pytest.mark.parametrize("nonfinite", ["ignore", "skip", "raise"])
@pytest.mark.parametrize("name", ONE_ENTRY)
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_of_one_entry_is_a_scalar(ctx, name, shape, nonfinite):
    def shaped(m, b):
        loss = ONE_ENTRY[name](m, b)
        if isinstance(loss, fx.Weighted):
            return fx.Weighted(loss.total.reshape(shape), loss.weight)
        return loss.reshape(shape)

    plan = fx.Plan(nonfinite=nonfinite, accumulate=2)
    (one, scalars), (other, shapes) = (
        _train(ctx, plan, epochs=1, loss=loss) for loss in (ONE_ENTRY[name], shaped)
    )
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert [float(a.loss) for a in scalars] == [float(b.loss) for b in shapes]
    assert all(report.loss.shape == () for report in shapes)


def test_an_optimizer_that_needs_a_closure_is_refused_and_works_by_hand(ctx):
    for lbfgs in (torch.optim.LBFGS, lambda p: {"a": SGD(p), "b": torch.optim.LBFGS(p)}):
        with pytest.raises(fx.PlanError, match=r"LBFGS\.step needs a closure.*without an opt"):
            fx.wrap(_net(), ctx, optimizer=lbfgs)
    net = _net()
    with pytest.raises(fx.PlanError, match="closure"):
        fx.wrap(net, ctx, optimizer=torch.optim.LBFGS(net.parameters()))
    model, batch = fx.wrap(net, ctx), _one_batch(ctx)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        return loss

    before = optimizer.step(closure).detach()
    assert _loss(model, batch).detach() < before


class _Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x):
        return self.used(x)


def _with_unused(ctx, strategy, accumulate):
    plan = fx.Plan(strategy=strategy, accumulate=accumulate)
    model = fx.wrap(_Unused(), ctx, plan, optimizer=SGD)
    fns, words = fx.StepFns(model=model, loss=_loss), []
    for batch in fx.shard(DataLoader(_data(), batch_size=4), ctx, plan):
        try:
            fx.step(ctx, batch, fns)
        except fx.StepError as error:
            words.append(str(error))
    return words


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_parameter_without_gradient_is_named_with_what_allows_it(pair, accumulate):
    for words in pair.run(_with_unused, fx.DDP(), accumulate):
        assert words
        for text in words:
            assert "reached 2 of 4. Without gradient: spare.weight, spare.bias." in text
            assert "fx.DDP(unused_parameters=True)" in text
    assert pair.run(_with_unused, fx.DDP(unused_parameters=True), accumulate) == [[], []]
    assert pair.run(_with_unused, fx.FSDP(), accumulate) == [[], []]


def test_step_refuses_what_is_no_batch_and_no_trained_model(ctx):
    model = fx.wrap(_net(), ctx, optimizer=SGD)
    with pytest.raises(fx.StepError, match=r"fx\.shard"):
        fx.step(ctx, _data()[0], fx.StepFns(model=model, loss=_loss))
    with pytest.raises(fx.StepError, match="no optimizer"):
        fx.step(ctx, _one_batch(ctx), fx.StepFns(model=fx.wrap(_net(), ctx), loss=_loss))
    with pytest.raises(fx.StepError, match=r"fx\.wrap"):
        fx.StepFns(model=_net(), loss=_loss)
    with pytest.raises(fx.StepError, match="function"):
        fx.StepFns(model=model, loss=None)


def test_wrap_refuses_what_it_cannot_use(ctx):
    net = _net()
    for wrong, words in (
        (lambda: fx.wrap("net", ctx), r"torch\.nn\.Module"),
        (lambda: fx.wrap(fx.wrap(net, ctx), ctx), "wrapped already"),
        (lambda: fx.wrap(net, "ctx"), "not a context"),
        (lambda: fx.wrap(net, ctx, {"accumulate": 2}), "not a Plan"),
        (lambda: fx.wrap(net, ctx, optimizer=3), "factory"),
        (lambda: fx.wrap(net, ctx, optimizer=lambda p: None), "returned NoneType"),
        (lambda: fx.wrap(net, ctx, scheduler=lambda o: o), "needs an optimizer"),
        (lambda: fx.wrap(net, ctx, optimizer=SGD(_net().parameters())), "pass a factory"),
        (lambda: fx.wrap(net, ctx, fx.Plan(recompute=("Blok",))), "Did you mean Block"),
        (
            lambda: fx.wrap(copy.deepcopy(net).requires_grad_(False), ctx, optimizer=SGD),
            "requires_grad_",
        ),
    ):
        with pytest.raises(fx.PlanError, match=words):
            wrong()


def test_an_optimizer_over_the_model_itself_is_accepted(ctx):
    net = _net()
    optimizer = SGD(net.parameters())
    assert fx.wrap(net, ctx, optimizer=optimizer).optimizer is optimizer


def test_single_refuses_two_ranks():
    from fxtrain.state import DistContext

    with pytest.raises(fx.PlanError, match="would train separate models"):
        fx.wrap(_net(), DistContext(world_size=2), fx.Plan(strategy=fx.Single()))


def test_unwrap_gives_the_module_back_as_it_was(ctx):
    net = _net()
    before = {name: module.__dict__.get("forward") for name, module in net.named_modules()}
    plan = fx.Plan(recompute=("Block",), compile=fx.Compile(backend="eager"))
    names = list(net.state_dict())
    model = fx.wrap(net, ctx, plan)
    assert list(net.state_dict()) == names and net[0].forward is not before["0"]
    assert fx.unwrap(model) is net
    assert {n: m.__dict__.get("forward") for n, m in net.named_modules()} == before
    assert net._compiled_call_impl is None


def test_modules_of_torch_itself_are_compiled_too(ctx):
    from torch._dynamo.utils import counters

    counters.clear()
    net = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    fx.wrap(net, ctx, fx.Plan(compile=fx.Compile(backend="eager")))(torch.ones(1, 2))
    assert counters["stats"]["unique_graphs"] == 1


class _Blocks(nn.Module):
    """Of torch's modules, in a loop that torch leaves at the first hook inside."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


COMPILED = {
    "a Sequential": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)), ()),
    "a module": (_Blocks, ()),
    "blocks": (_Blocks, ("Sequential",)),
}


def _compiled(ctx, name, strategy):
    from torch._dynamo.utils import counters

    make, blocks = COMPILED[name]
    torch.compiler.reset()
    counters.clear()
    compile_ = fx.Compile(backend="eager", blocks=blocks)
    losses = {}
    for plan in (fx.Plan(strategy=strategy), fx.Plan(strategy=strategy, compile=compile_)):
        torch.manual_seed(0)
        net = make()
        before = {path: "forward" in vars(part) for path, part in net.named_modules()}
        model, reports = _train(ctx, plan, net=net, epochs=1)
        losses[plan] = [float(report.loss) for report in reports]
    fx.unwrap(model)
    undone = before == {path: "forward" in vars(part) for path, part in net.named_modules()}
    return [*losses.values()], counters["stats"]["calls_captured"], undone


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("strategy", [fx.FSDP(), fx.FSDP(wrap=("Linear",))], ids=["", "linear"])
@pytest.mark.filterwarnings("ignore:.*FSDP.*:UserWarning")
def test_what_stands_behind_hooks_of_fsdp_is_compiled(pair, name, strategy):
    for (plain, compiled), calls, undone in pair.run(_compiled, name, strategy):
        assert compiled == pytest.approx(plain, rel=1e-5)
        assert calls >= 2 and undone


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_fp16_on_a_cpu_is_advised_against_once(ctx, compute, caplog):
    net = torch.nn.Linear(2, 1)
    model = fx.wrap(net, ctx, fx.Plan(precision=compute))
    model(torch.ones(1, 2))
    found = [one.message for one in caplog.records if 'Use precision="bf16"' in one.message]
    assert len(found) == (compute == "fp16")


def test_it_is_told_how_many_graphs_were_compiled(ctx, caplog):
    plan = fx.Plan(compile=fx.Compile(backend="eager"))
    with caplog.at_level("INFO", logger="fxtrain.compile"):
        model = fx.wrap(nn.Sequential(nn.Linear(2, 2)), ctx, plan)
        model(torch.ones(1, 2)), model(torch.ones(1, 2))
    assert [one.message for one in caplog.records] == [
        "torch.compile created 1 graphs of Sequential, 1 so far"
    ]
    caplog.clear()
    left = torch.compiler.disable(nn.Linear(2, 2))
    fx.wrap(nn.Sequential(left), ctx, plan)(torch.ones(1, 2))
    assert "created no graph of Sequential" in caplog.text


def test_eval_and_train_modes(ctx):
    model = fx.wrap(_net(), ctx)
    assert model.eval().module.training is False and model.train().module.training is True


def test_logging_knows_its_rank(ctx, caplog):
    import attrs

    with caplog.at_level("INFO"):
        fx.log(ctx).info("main %d", 1)
        fx.log(attrs.evolve(ctx, rank=1)).info("hidden")
        fx.log(attrs.evolve(ctx, rank=1)).info("loud", everyone=True)
    assert [r.getMessage() for r in caplog.records] == ["main 1", "[rank 1] loud"]
    assert caplog.records[0].filename == "test_step.py"


def test_seeds_per_rank(ctx):
    import attrs

    other = attrs.evolve(ctx, rank=1, world_size=2)
    draws = []
    for one in (ctx, other):
        for per_rank in (False, True):
            ops.seed(5, one, per_rank=per_rank)
            draws.append(float(torch.rand(1)))
    assert draws[0] == draws[1] == draws[2] != draws[3]
    with pytest.raises(fx.PlanError, match="seed"):
        ops.seed(-1, ctx)


def test_power_sgd_in_several_buckets_over_gloo_is_refused_before_it_can_hang(pair):
    def problems(bucket_mib):
        hook = fx.CommHook(name="power_sgd")
        return fx.Plan(strategy=fx.DDP(bucket_mib=bucket_mib, hook=hook))

    told = pair.run(_refused, problems(0.0001))
    assert all("more than one bucket" in text for text in told)
    assert pair.run(_refused, problems(1.0)) == [None, None]


def _refused(ctx, plan):
    try:
        fx.wrap(_net(), ctx, plan)
    except fx.PlanError as error:
        return str(error)
    return None


def _plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


def _rates(ctx, metrics):
    """The learning rate after each epoch, whose metric differs between the ranks."""
    model = fx.wrap(_net(), ctx, optimizer=SGD, scheduler=lambda opt: {"plateau": _plateau(opt)})
    fns = fx.StepFns(model=model, loss=_loss)
    loader = fx.shard(DataLoader(_data(8), batch_size=4), ctx)
    rates = []
    for epoch, metric in zip(loader.epochs(len(metrics)), metrics, strict=True):
        for batch in epoch:
            fx.step(ctx, batch, fns)
        ops.schedule(metric + (0.25 if ctx.is_last else -0.25), model)
        rates.append(model.optimizer.param_groups[0]["lr"])
    return rates


def test_a_plateau_follows_the_mean_of_a_metric(pair):
    assert pair.run(_rates, [3.0, 2.0, 2.0, 1.5, 1.6]) == [[0.1, 0.1, 0.05, 0.05, 0.025]] * 2


def _two_epochs(ctx, scheduler, *, metric):
    model = fx.wrap(_net(), ctx, optimizer=SGD, scheduler=scheduler)
    fns = fx.StepFns(model=model, loss=_loss)
    for epoch in fx.shard(DataLoader(_data(8), batch_size=4), ctx).epochs(2):
        for batch in epoch:
            fx.step(ctx, batch, fns)
        if metric:
            ops.schedule(torch.tensor([1.0]), model)


def test_a_plateau_without_a_metric_is_logged(ctx, caplog):
    with caplog.at_level("INFO"):
        _two_epochs(ctx, _plateau, metric=True)
        _two_epochs(ctx, lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1), metric=False)
        assert caplog.messages == []
        _two_epochs(ctx, _plateau, metric=False)
    (text,) = caplog.messages
    assert "ReduceLROnPlateau" in text and "fx.ops.schedule(metric, model)" in text


def test_a_metric_without_a_scheduler_for_it_is_refused(ctx):
    model = fx.wrap(_net(), ctx, optimizer=SGD)
    with pytest.raises(fx.StepError, match="no scheduler that follows a metric"):
        ops.schedule(1.0, model)
    model = fx.wrap(_net(), ctx, optimizer=SGD, scheduler=_plateau)
    for metric in ("1.0", None, torch.ones(2)):
        with pytest.raises(fx.StepError, match="takes one number"):
            ops.schedule(metric, model)


@pytest.mark.parametrize("wrong", [{"loss": 1}, None, "loss"])
def test_a_logger_wants_a_context(wrong):
    with pytest.raises(fx.ContextError, match=r"log takes a context, found .*fx\.log\(ctx\)\.info"):
        fx.log(wrong)


def test_a_logger_wants_a_name(ctx):
    with pytest.raises(fx.ContextError, match=r"name=3"):
        fx.log(ctx, 3)


SPEAKING = """
import logging, sys, attrs, fxtrain as fx
with fx.detect(env={}, device="cpu") as ctx:
    fx.log(ctx).info("main %d", 1)
    fx.log(ctx).debug("detail")
    other = attrs.evolve(ctx, rank=1)
    fx.log(other).info("silent")
    fx.log(other).info("asked", everyone=True)
    logging.getLogger("fxtrain").setLevel("ERROR")
    fx.log(ctx).warning("below the user's level")
    logging.basicConfig(format="user: %(message)s", level="INFO")
    fx.log(ctx, "mine").info("by the user's handler")
"""


def test_the_main_rank_is_heard_without_a_setup_of_logging():
    done = subprocess.run(
        [sys.executable, "-c", SPEAKING], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stderr.splitlines() == ["main 1", "[rank 1] asked", "user: by the user's handler"]


def test_step_functions_by_position(ctx):
    model = fx.wrap(_net(), ctx, optimizer=SGD)
    fns = fx.StepFns(model, _loss)
    assert (fns.model, fns.loss) == (model, _loss)


@pytest.mark.parametrize(
    "loss", [nn.CrossEntropyLoss(), F.cross_entropy], ids=["module", "function"]
)
def test_a_criterion_as_a_loss_is_answered_by_the_function_to_write(ctx, loss):
    model = fx.wrap(_net(), ctx, optimizer=SGD)
    with pytest.raises(fx.StepError, match=r"lambda model, batch: .*\(model\(batch\[0\]\), batch"):
        fx.StepFns(model, loss)
