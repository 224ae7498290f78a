"""Muon on two ranks: who computes, what is sent, what is saved, and what is refused."""

import itertools

import pytest
import torch
from torch import nn
from torch.optim import _muon

import fxtrain as fx
from fxtrain.backends import muon
from fxtrain.backends.deepspeed.setup import single_optimizer
from fxtrain.testing import Transformer, count_collectives
from fxtrain.testing.training import on_mesh
from tests._errors import raises_code
from tests._slow import slow_after
from tests.cluster._models import DOWN, PIPELINES, UP

SHAPES = [(8, 8), (8, 4), (4, 8), (6, 4)]
PLANS = {
    "replicas": fx.Plan(strategy=fx.DDP()),
    "shards": fx.Plan(strategy=fx.FSDP(min_params=1)),
    "sharded states": fx.Plan(strategy=fx.DDP(shard_optimizer=True)),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(n, m) for m, n in SHAPES)

    def forward(self, x):
        return sum(layer(x[:, : layer.in_features]).square().sum() for layer in self.layers)


def _pair_of_optimizers(params):
    matrices = [p for p in params if p.ndim == 2]
    others = [p for p in params if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.01)]


def _wrap(ctx, plan):
    steps = torch.optim.lr_scheduler.StepLR
    return fx.wrap(
        Net(),
        ctx,
        plan,
        optimizer=_pair_of_optimizers,
        scheduler=lambda made: [steps(optimizer, 1, 0.5) for optimizer in made],
    )


def _update(ctx, model, number):
    batch = fx.batch(torch.linspace(-1, 1, 8)[None] + number, ctx, model.plan)
    return fx.update(ctx, batch, model, model(batch.data))


def _counted(ctx, plan):
    model, calls = _wrap(ctx, plan), []

    def counting(compute):
        return lambda matrix, *options: (
            calls.append(tuple(matrix.shape)) or compute(matrix, *options)
        )

    # With sharded states, torch's own optimizer updates the matrices of a rank.
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (muon, "_newton_schulz"), (_muon, "_zeropower_via_newtonschulz"):
            patch.setattr(module, name, counting(getattr(module, name)))
        with fx.ops.sync(model):
            fx.ops.backward(model(torch.ones(1, 8)), model)
        with count_collectives() as traffic:
            model.optimizer[0].step()
    return calls, traffic.counts, traffic.bytes


@pytest.mark.parametrize("name", PLANS)
def test_each_matrix_is_computed_on_one_rank(pair, name):
    answers = pair.run(_counted, PLANS[name])
    computed = [calls for calls, _, _ in answers]
    assert sorted(itertools.chain.from_iterable(computed)) == sorted(SHAPES)
    assert min(map(len, computed)) >= 1
    elements = sum(m * n for m, n in SHAPES)
    for _, counts, _ in answers:
        if name == "replicas":
            assert counts == {"all_to_all": 1}
        elif name == "shards":
            assert counts == {"all_to_all": 2}
    if name != "sharded states":  # bf16, and a rank's own parts are not sent
        assert sum(sent["all_to_all"] for _, _, sent in answers) == 2 * elements


def _resumed(ctx, plan, folder, start, stop):
    model, position = _wrap(ctx, plan), None
    if start:
        fx.restore(folder, ctx, model)
    for number in range(start, stop):
        position = _update(ctx, model, number).position
    rates = [group["lr"] for one in model.optimizers for group in one.param_groups]
    if not start:
        fx.save(folder, ctx, model, position=position)
    return {name: value.clone() for name, value in fx.weights(model)}, rates


@pytest.mark.parametrize(("before", "after"), slow_after(1, itertools.permutations(PLANS, 2)))
def test_a_checkpoint_is_that_of_torch(pair, ctx, tmp_path, before, after):
    wanted, rates = _resumed(ctx, fx.Plan(), tmp_path / "alone", 0, 4)
    folder = str(tmp_path / "run")
    pair.run(_resumed, PLANS[before], folder, 0, 2)
    for weights, found in pair.run(_resumed, PLANS[after], folder, 2, 4):
        assert found == rates
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
    weights, _ = _resumed(ctx, fx.Plan(), folder, 2, 4)
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def _ready_made(ctx, plan):
    net = Net()
    optimizer = torch.optim.Muon([p for p in net.parameters() if p.ndim == 2], lr=0.1)
    rest = torch.optim.AdamW([p for p in net.parameters() if p.ndim != 2], lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model = fx.wrap(net, ctx, plan, optimizer=[optimizer, rest], scheduler=scheduler)
    _update(ctx, model, 0)
    return model.optimizers[0].param_groups[0]["lr"], dict(fx.weights(model))


@pytest.mark.parametrize("name", PLANS)
def test_a_ready_made_optimizer_and_its_scheduler(pair, ctx, name):
    _, wanted = _ready_made(ctx, fx.Plan())
    for rate, weights in pair.run(_ready_made, PLANS[name]):
        assert rate == 0.05
        for key, value in wanted.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-6)


class _Text(nn.Sequential):
    """A stage without matrices for AdamW, after the embedding."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Embedding(4, 4), *(nn.Linear(4, 4, bias=False) for _ in range(4)))


def _embedding_apart(params, *, groups):
    parts = [
        [p for n, p in params.named() if n.startswith("0.") == first] for first in (False, True)
    ]
    matrices, others = [[{"params": part}] if groups else part for part in parts]
    return [torch.optim.Muon(matrices, lr=0.1), torch.optim.AdamW(others, lr=0.01)]


def _text_updates(ctx, plan, folder, start, stop):
    model = fx.wrap(_Text(), ctx, plan, optimizer=lambda p: _embedding_apart(p, groups=True))
    if start:
        fx.restore(folder, ctx, model)
    fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
    for number in range(start, stop):
        rows = torch.arange(12).view(4, 3) * (number + 1) % 4
        report = fx.step(ctx, fx.batch(rows, ctx, plan), fns)
    fx.save(folder, ctx, model, position=report.position)
    return {name: value.clone() for name, value in fx.weights(model)}


def _staged(ctx, folder):
    plan = fx.Plan(strategy=fx.PP(split=("3",)))
    with on_mesh(ctx, fx.Mesh(pipeline=2)) as placed:
        return _text_updates(placed, plan, folder, 0, 2)


@PIPELINES
def test_a_stage_may_have_no_parameter_of_an_optimizer(pair, ctx, tmp_path):
    wanted = _text_updates(ctx, fx.Plan(), tmp_path / "alone", 0, 4)
    pair.run(_staged, str(tmp_path / "run"))
    weights = _text_updates(ctx, fx.Plan(), tmp_path / "run", 2, 4)
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


def _computed_by(ctx):
    with on_mesh(ctx, fx.Mesh(pipeline=2, replicate=2)) as placed:
        plan = fx.Plan(strategy=fx.PP(split=("3",)))
        model = fx.wrap(_Text(), placed, plan, optimizer=lambda p: _embedding_apart(p, groups=True))
        fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
        calls, compute = [], muon._newton_schulz
        muon._newton_schulz = lambda *args: calls.append(0) or compute(*args)
        try:
            fx.step(placed, fx.batch(torch.arange(6).view(2, 3) % 4, placed, plan), fns)
        finally:
            muon._newton_schulz = compute
        return len(calls)


@PIPELINES
@pytest.mark.slow  # four ranks
def test_replicas_of_a_stage_share_the_work(clusters):
    assert clusters[4].run(_computed_by) == [1] * 4


def _between_averages(ctx):
    """Independent replicas have different gradients, so each computes its own updates."""
    plan = fx.Plan(strategy=fx.DDP(), local=fx.LocalSGD(every=2))
    model = fx.wrap(Net(), ctx, plan, optimizer=lambda params: _pair_of_optimizers(params)[0])
    return type(model.optimizer)


def test_replicas_that_differ_share_no_work(pair):
    assert pair.run(_between_averages) == [torch.optim.Muon] * 2


@pytest.mark.slow
def test_a_dry_run_counts_its_exchanges():
    def loop(ctx):
        model = fx.wrap(
            Net(),
            ctx,
            PLANS["shards"],
            optimizer=lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
        )
        for number in range(3):
            _update(ctx, model, number)

    found = fx.dry_run(loop, world=8)
    assert [(one.count, one.ranks) for one in found.step if one.kind == "all_to_all"] == [(2, 8)]


@pytest.mark.slow
@PIPELINES
def test_a_stage_that_is_sharded_and_split_has_a_group_of_its_own():
    split = fx.TP(styles=(UP, DOWN))
    stages = fx.FSDP(wrap=("Block",), tensor=split, mode="grads_and_optimizer")
    plan = fx.Plan(strategy=fx.PP(stages=stages))

    def loop(ctx):
        model = fx.wrap(Transformer(), ctx, plan, optimizer=_pair_of_optimizers)
        fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
        for _ in range(2):
            rows = torch.zeros(4, Transformer.LENGTH, dtype=torch.int64)
            fx.step(ctx, fx.batch(rows, ctx, plan), fns)

    found = fx.dry_run(loop, world=8, mesh=fx.Mesh(pipeline=2, shard=2, tensor=2))
    sent = {one.ranks: one.count for one in found.step if one.kind == "all_to_all"}
    assert sent == {2: 2, 4: 2}  # of a matrix that is not split, and of one that is


def test_parameters_that_are_no_matrices_are_named(ctx):
    with raises_code("FX200", "4 parameters", "layers.0.bias", "AdamW"):
        fx.wrap(Net(), ctx, optimizer=torch.optim.Muon)
    with raises_code("FX200", "1 parameter"):
        fx.wrap(nn.Linear(2, 2), ctx, optimizer=torch.optim.Muon)


def test_deepspeed_refuses_it():
    made = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])
    with raises_code("FX200", '"type"', '"Muon"'):
        single_optimizer((made,))
