"""Buffers that training changes: evaluation gives the same on every rank, as under torch's DDP."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import fxtrain as fx
from tests._slow import slow_after
from tests.cluster._models import PIPELINES

SGD = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        return nn.Sequential(*layers, nn.Linear(8, 3)).double()


def _data(n=64):
    rows = torch.randn(n, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    return DataLoader(rows, batch_size=4)


def _loss(model, batch):
    return model(batch.data).square().mean()


@torch.no_grad()
def _evaluated(model):
    model.eval()
    out = model(torch.ones(2, 6, dtype=torch.double))
    model.train()
    return out


def _by_torch(ctx, batches, plan):
    """What a loop on torch's own DDP evaluates to, once a window."""
    engine = DistributedDataParallel(_net(), process_group=ctx.comm.group)
    optimizer = SGD(engine.parameters())
    found = []
    for number, batch in enumerate(batches, 1):
        engine.require_backward_grad_sync = plan.sync_each or number % plan.accumulate == 0
        (engine(batch.data).square().mean() / plan.accumulate).backward()
        if number % plan.accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            found.append(_evaluated(engine))
    return found


def _trained(ctx, plan, compared, mesh=None):
    if mesh is not None:
        with fx.detect(device="cpu", mesh=mesh) as meshed:
            return _trained(meshed, plan, compared)
    model = fx.wrap(_net(), ctx, plan, optimizer=SGD)
    batches = list(fx.shard(_data(), ctx, plan))
    fns = fx.StepFns(model=model, loss=_loss)
    found = [_evaluated(model) for batch in batches if fx.step(ctx, batch, fns).applied]
    return found, _by_torch(ctx, batches, plan) if compared else None


PLANS = {
    "ddp": fx.Plan(),
    "windows": fx.Plan(accumulate=2),
    "sync_each": fx.Plan(accumulate=2, sync_each=True),
    "any graph": fx.Plan(strategy=fx.DDP(unused_parameters=True)),
    "static graph": fx.Plan(strategy=fx.DDP(static_graph=True)),
    "shared optimizer": fx.Plan(strategy=fx.DDP(shard_optimizer=True)),
    "fsdp": fx.Plan(strategy=fx.FSDP(wrap=("Linear",))),
    "fsdp, windows": fx.Plan(strategy=fx.FSDP(), accumulate=2),
    "fsdp, whole": fx.Plan(strategy=fx.FSDP(mode="none")),
}


# The other plans run the same code before an evaluation.
QUICK = ("ddp", "windows", "fsdp", "fsdp, windows")


@pytest.mark.parametrize(
    "name",
    slow_after(
        2, [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLANS]
    ),
)
@pytest.mark.filterwarnings("ignore:.*FSDP.*:UserWarning")
def test_every_rank_evaluates_as_torchs_ddp_does(pair, name):
    runs = pair.run(_trained, PLANS[name], True)
    for found, by_torch in runs:
        torch.testing.assert_close(found, by_torch)
        assert all(map(torch.equal, found, runs[0][0])) and len(found) >= 4


@pytest.mark.slow
@PIPELINES
def test_replicas_of_stages_evaluate_alike(clusters):
    plan = fx.Plan(strategy=fx.PP(split=("2",), microbatches=2))
    mesh = fx.Mesh(replicate=2, pipeline=2)
    runs = [found for found, _ in clusters[4].run(_trained, plan, False, mesh)]
    assert all(torch.equal(one[-1], runs[0][-1]) for one in runs)


def _sharded_copies(ctx):
    plan = fx.Plan(strategy=fx.FSDP(), local=fx.LocalSGD(every=4))
    with fx.detect(device="cpu", mesh=fx.Mesh(replicate=2, shard=2)) as meshed:
        return _trained(meshed, plan, compared=False)[0]


@pytest.mark.slow
def test_ranks_of_a_copy_evaluate_alike_and_copies_where_a_round_ends(clusters):
    runs = clusters[4].run(_sharded_copies)
    assert torch.equal(runs[0][1], runs[1][1]) and not torch.equal(runs[0][1], runs[2][1])
    assert all(torch.equal(one[3], runs[0][3]) for one in runs)


def _one_rank_evaluates(ctx):
    model = fx.wrap(_net(), ctx, optimizer=SGD)
    fns = fx.StepFns(model=model, loss=_loss)
    for number, batch in enumerate(fx.shard(_data(), ctx)):
        if number % 3 == ctx.rank:
            _evaluated(model)
        fx.step(ctx, batch, fns)
    return _evaluated(model) if ctx.rank else None


def test_a_rank_may_evaluate_by_itself_at_any_time(pair):
    alone = pair.run(_one_rank_evaluates)[1]
    (together, _), _ = pair.run(_trained, fx.Plan(), False)
    assert torch.equal(alone, together[-1])


def _by_hand(ctx, how):
    model = fx.wrap(_net(), ctx, optimizer=SGD)
    for batch in fx.shard(_data(), ctx):
        if how == "sync":
            with fx.ops.sync(model):
                fx.ops.backward(_loss(model, batch), model)
        else:
            _loss(model, batch).backward()
        if how == "torch":
            model.optimizer.step()
            model.optimizer.zero_grad()
        else:
            fx.ops.apply(model)
    return _evaluated(model)


@pytest.mark.parametrize("how", ["sync", "apply", "torch"])
def test_loops_by_hand_evaluate_alike_too(pair, how):
    (together, _), _ = pair.run(_trained, fx.Plan(), False)
    for out in pair.run(_by_hand, how):
        torch.testing.assert_close(out, together[-1])


def test_buffers_stay_apart_if_asked(pair):
    plan = fx.Plan(strategy=fx.DDP(sync_buffers=False))
    (first, _), (second, _) = pair.run(_trained, plan, False)
    assert not torch.equal(first[0], second[0])


class _Table(nn.Module):
    """Reads a buffer that no state_dict holds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.ones(6), persistent=False)

    def forward(self, x):
        return self.linear(x * self.table)


def _broadcasts(ctx, strategy):
    from fxtrain.testing import count_collectives

    model = fx.wrap(_Table().double(), ctx, fx.Plan(strategy=strategy), optimizer=SGD)
    fns = fx.StepFns(model=model, loss=_loss)
    batches = list(fx.shard(_data(), ctx))
    with count_collectives() as traffic:
        fx.step(ctx, batches[0], fns)
    return traffic.counts.get("broadcast", 0)


def test_tables_that_forward_only_reads_are_not_sent_by_fsdp(pair):
    assert pair.run(_broadcasts, fx.FSDP()) == [0, 0]


WAYS = {
    "step": lambda ctx, batch, model: fx.step(ctx, batch, fx.StepFns(model, _loss)),
    "update": lambda ctx, batch, model: fx.update(ctx, batch, model, _loss(model, batch)),
    "parts": lambda ctx, batch, model: (
        fx.ops.backward(_loss(model, batch), model, batch),
        fx.ops.apply(model),
    ),
}


def _poisoned(ctx, plan, way, poisoned):
    """Parameters and buffers after windows, with or without one in which a rank has a NaN."""
    model = fx.wrap(_net(), ctx, plan, optimizer=SGD)
    rows = torch.randn(6, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    rows[3] = rows[3] * (torch.nan if ctx.is_last else 1.0)
    if not poisoned:  # the window with that micro-batch
        rows = rows[
            [index for index in range(6) if index // plan.accumulate != 3 // plan.accumulate]
        ]
    position = None
    for one in rows:
        batch = fx.batch(one, ctx, plan, **({} if position is None else {"after": position}))
        position = batch.position
        try:
            WAYS[way](ctx, batch, model)
        except fx.errors.StepError as error:
            assert plan.nonfinite == "raise" and "Non-finite" in str(error)
    return {name: value.clone() for name, value in fx.weights(model)}


SKIPPING = {
    "alone": (1, fx.Plan(nonfinite="skip")),
    "ddp": (2, fx.Plan(nonfinite="skip")),
    "windows": (2, fx.Plan(nonfinite="skip", accumulate=2)),
    "raised": (2, fx.Plan(nonfinite="raise", accumulate=3)),
    "own": (2, fx.Plan(nonfinite="skip", strategy=fx.DDP(sync_buffers=False))),
    "fsdp": (2, fx.Plan(nonfinite="skip", accumulate=2, strategy=fx.FSDP())),
}


@pytest.mark.parametrize(
    ("name", "way"),
    # Windows are what the other ways of a training loop close by themselves.
    [(name, "step") for name in SKIPPING]
    + slow_after(0, [("windows", way) for way in WAYS if way != "step"]),
)
@pytest.mark.filterwarnings("ignore:.*FSDP.*:UserWarning")
def test_a_skipped_window_leaves_nothing_in_buffers(clusters, name, way):
    n, plan = SKIPPING[name]
    wanted = clusters[n].run(_poisoned, plan, way, False)
    for found, clean in zip(clusters[n].run(_poisoned, plan, way, True), wanted, strict=True):
        assert any(name.endswith("running_mean") for name in found)
        for name, value in found.items():
            assert torch.equal(value, clean[name]), f"{name}: {value}"


def _resumed(ctx, plan, folder, load):
    """What a run has after a window whose second micro-batch is skipped; saved before that one."""
    model = fx.wrap(_net(), ctx, plan, optimizer=SGD)
    fns = fx.StepFns(model, _loss)
    rows = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    rows[3] *= torch.nan
    position = fx.restore(folder, ctx, model).position if load else fx.Position()
    for one in rows[3 if load else 0 :]:
        batch = fx.batch(one, ctx, plan, after=position)
        position = fx.step(ctx, batch, fns).position
        if position.micro and position.updates:
            fx.save(folder, ctx, model, position=position)
    return {name: value.clone() for name, value in fx.weights(model)}


@pytest.mark.parametrize("then", [2, 1])
def test_an_open_window_is_resumed_with_the_buffers_from_before_it(clusters, tmp_path, then):
    plan = fx.Plan(nonfinite="skip", accumulate=2)
    whole = clusters[2].run(_resumed, plan, str(tmp_path), False)
    for found in clusters[then].run(_resumed, plan, str(tmp_path), True):
        for name, value in found.items():
            assert torch.equal(value, whole[0][name]), name


class _Replaced(nn.Module):
    """Replaces a buffer by another, whose shape depends on the data."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach().flatten()])
        return self.linear(x)


def test_a_buffer_that_a_skipped_window_replaced_is_put_back(ctx):
    model = fx.wrap(_Replaced(), ctx, fx.Plan(nonfinite="skip"), optimizer=SGD)
    for value in (1.0, torch.nan, 2.0):
        fx.ops.backward(model(torch.full((1, 1), value)).sum(), model)
        fx.ops.apply(model)
    assert model.module.seen.tolist() == [0.0, 1.0, 2.0]
