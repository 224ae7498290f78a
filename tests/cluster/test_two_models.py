"""Several models on one loader: windows of their own, and what each counts."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
from tests._slow import slow_after
from tests.cluster._two_models import data, error_inside_a_window, makers_loss, nets

EPOCHS, ROWS, GLOBAL = 1, 48, 8  # rows of the data, and of a batch over all ranks

PLANS = {
    "ddp": fx.Plan(),
    "ddp, optimizer sharded": fx.Plan(strategy=fx.DDP(shard_optimizer=True)),
    "fsdp": fx.Plan(strategy=fx.FSDP(min_params=1)),
    "clipped": fx.Plan(clip_norm=0.05),
}
WINDOWS = {
    "ddp": fx.Plan(accumulate=3),
    "ddp, reduced each": fx.Plan(accumulate=2, sync_each=True),
    "ddp, unused": fx.Plan(strategy=fx.DDP(unused_parameters=True), accumulate=2),
    "fsdp": fx.Plan(strategy=fx.FSDP(min_params=1), accumulate=3),
    "fsdp, reduced each": fx.Plan(strategy=fx.FSDP(min_params=1), accumulate=2, sync_each=True),
    "fsdp, kept whole": fx.Plan(
        strategy=fx.FSDP(min_params=1, mode="grads_and_optimizer"), accumulate=2, clip_norm=0.05
    ),
}


def _sgd(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.5)


def _judges_loss(judge, maker, noise, real):
    made = judge(maker(noise).detach())
    return F.softplus(-judge(real)).mean() + F.softplus(made).mean()


def _windows(batches, plan):
    batches = iter(batches)
    while window := list(itertools.islice(batches, plan.accumulate)):
        yield window


def _adversaries(ctx, plan, way="step"):
    """Parameters of both models after training under a plan."""
    maker, judge = (fx.wrap(net, ctx, plan, optimizer=_sgd) for net in nets())
    size = GLOBAL // ctx.axis("data").world_size
    loader = fx.shard(DataLoader(data(ROWS), batch_size=size), ctx, plan)
    of_judge = fx.StepFns(model=judge, loss=lambda m, b: _judges_loss(m, maker, *b))
    of_maker = fx.StepFns(model=maker, loss=lambda m, b: makers_loss(judge, m, b[0]))
    for epoch in loader.epochs(EPOCHS):
        for window in _windows(epoch, plan):
            for batch in window:
                if way == "step":
                    fx.step(ctx, batch, of_judge)
                else:
                    fx.update(ctx, batch, judge, _judges_loss(judge, maker, *batch))
            for batch in window:
                if way == "step":
                    fx.step(ctx, batch, of_maker)
                else:
                    fx.update(ctx, batch, maker, makers_loss(judge, maker, batch[0]))
    return [p.detach().clone() for m in (maker, judge) for p in fx.unwrap(m).parameters()]


def _adversaries_by_hand(plan):
    maker, judge = nets()
    optimizers = [_sgd(net.parameters()) for net in (maker, judge)]
    for _ in range(EPOCHS):
        for window in _windows(DataLoader(data(ROWS), batch_size=GLOBAL), plan):
            for net, optimizer, loss in (
                (judge, optimizers[1], lambda *batch: _judges_loss(judge, maker, *batch)),
                (maker, optimizers[0], lambda noise, _: makers_loss(judge, maker, noise)),
            ):
                optimizer.zero_grad()
                for batch in window:
                    (loss(*batch) / plan.accumulate).backward()
                if plan.clip_norm is not None:
                    nn.utils.clip_grad_norm_(net.parameters(), plan.clip_norm)
                optimizer.step()
    return [p.detach() for net in (maker, judge) for p in net.parameters()]


@pytest.mark.parametrize("name", PLANS)
def test_adversaries_equal_the_raw_loop(cluster, name):
    plan = PLANS[name]
    wanted = _adversaries_by_hand(plan)
    for got in cluster.run(_adversaries, plan):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "way"),
    slow_after(
        4,
        [*((name, "step") for name in WINDOWS), ("ddp", "update"), ("fsdp, kept whole", "update")],
    ),
)
def test_adversaries_in_turns_of_windows_equal_the_raw_loop(clusters, name, way):
    plan = WINDOWS[name]
    wanted = _adversaries_by_hand(plan)
    for pool in (clusters[1], clusters[2]):
        for got in pool.run(_adversaries, plan, way):
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def _inside_a_window(ctx, plan, reaches):
    return error_inside_a_window(ctx, plan, _sgd, _judges_loss, reaches)


def _penalty(judge, maker, noise):
    """A loss for which the judge is differentiated, and which leaves no gradient in it."""
    made = maker(noise)
    seen = made.detach().requires_grad_()
    (slope,) = torch.autograd.grad(judge(seen).sum(), [seen], create_graph=True)
    return (made * slope.detach()).mean()


def test_a_gradient_that_adds_nothing_is_none():
    with fx.detect(env={}, device="cpu") as ctx:
        assert _inside_a_window(ctx, WINDOWS["ddp"], _penalty) is None


@pytest.mark.parametrize("name", WINDOWS)
def test_the_other_models_backward_inside_a_window_is_an_error(pair, name):
    for words in pair.run(_inside_a_window, WINDOWS[name], makers_loss):
        assert words.startswith("The backward of another model's loss reached this")


def _left_behind(ctx, by_hand):
    """What an update sums after a backward that was called before the step."""
    net = nn.Linear(2, 1, bias=False)
    other = nn.Linear(2, 1, bias=False)
    net.other = other  # which no optimizer holds
    model = fx.wrap(net, ctx, optimizer=lambda _: torch.optim.SGD([net.weight], lr=1.0))
    with torch.no_grad():
        net.weight.zero_()
    x = torch.ones(1, 2)
    if by_hand:
        ops.backward(F.linear(x, net.weight).sum() * 10, model)
    else:
        (F.linear(x, net.weight).sum() * 10 + other(x).sum()).backward()
    fns = fx.StepFns(model=model, loss=lambda m, b: F.linear(b.data, net.weight).mean())
    for batch in fx.shard(DataLoader(torch.ones(1, 2), batch_size=1), ctx):
        fx.step(ctx, batch, fns)
    return net.weight.tolist()


def test_a_window_drops_what_another_backward_left():
    with fx.detect(env={}, device="cpu") as ctx:
        assert _left_behind(ctx, by_hand=False) == [[-1.0, -1.0]]


def test_a_window_keeps_what_the_models_own_backward_added():
    with fx.detect(env={}, device="cpu") as ctx:
        assert _left_behind(ctx, by_hand=True) == [[-11.0, -11.0]]


MODELS = {"often": fx.Plan(accumulate=2), "seldom": fx.Plan(accumulate=3, flush=False)}


def _loss(model, batch):
    return (model(batch.data) - 1).square().mean()


def _wrapped(ctx, plan):
    torch.manual_seed(0)
    adam = lambda params: torch.optim.Adam(params, lr=0.1)  # noqa: E731
    return fx.wrap(nn.Linear(1, 1), ctx, plan, optimizer=adam)


def _run(ctx, folder, stop=None, resume=False):  # noqa: FBT002
    """One model takes every batch, the other odd ones; what they report from a batch on."""
    models = {name: _wrapped(ctx, plan) for name, plan in MODELS.items()}
    data = torch.linspace(-1, 1, 22)[:, None]
    loader = fx.shard(DataLoader(data, batch_size=1), ctx, fx.Plan(batch="per_rank"))
    position = fx.restore(folder, ctx, models).position if resume else fx.Position()
    reports = []
    for epoch in loader.at(position).epochs(2):
        for batch in epoch:
            for name, model in models.items():
                if name == "often" or batch.position.updates % 2:
                    report = fx.step(ctx, batch, fx.StepFns(model=model, loss=_loss))
                    reports.append((name, report.updates, report.applied))
            if batch.position.updates == stop:
                fx.save(folder, ctx, models, position=batch.position)
                reports.clear()
    return reports, [fx.unwrap(model).weight.item() for model in models.values()]


@pytest.mark.parametrize("stop", slow_after(1, [4, 7, 13]))
def test_models_count_in_checkpoints(pair, stop, tmp_path):
    whole = pair.run(_run, str(tmp_path), stop)
    assert pair.run(_run, str(tmp_path), None, True) == whole
    last = {name: updates for name, updates, _ in whole[0][0]}
    assert last == {"often": 12, "seldom": 3}  # 2 epochs of 11 batches: 6 + 6, and 11 // 3


def test_a_report_shows_the_updates_of_its_model(pair):
    (reports, _), _ = pair.run(_run, "")
    assert reports[:5] == [
        ("often", 0, False),
        ("seldom", 0, False),
        ("often", 1, True),
        ("often", 1, False),
        ("seldom", 0, False),
    ]


def test_a_model_without_an_update_in_an_epoch_warns_once(caplog):
    with fx.detect(env={}, device="cpu") as ctx:
        model = _wrapped(ctx, fx.Plan(accumulate=7, flush=False))
        fns = fx.StepFns(model=model, loss=_loss)
        loader = fx.shard(DataLoader(torch.ones(2, 1), batch_size=1), ctx)
        for epoch in loader.epochs(3):
            for batch in epoch:
                fx.step(ctx, batch, fns)
    (warning,) = [one.getMessage() for one in caplog.records]
    assert "Linear: no update in a whole epoch. Micro-batches so far: 2" in warning
    assert "Plan(accumulate=7) makes an update when there are 7" in warning


class _Sized:
    """Batches of 1, 2, 3, 1 and 2 rows."""

    def __iter__(self):
        yield from ([0], [1, 2], [3, 4, 5], [6], [7, 8])

    def __len__(self):
        return 5


def _sized(ctx):
    """The weight after each update, and as the mean over the rows of each window makes it."""
    rows = torch.arange(9.0)[:, None] / 9
    plan = fx.Plan(accumulate=2)
    net = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        net.weight.fill_(1.0)
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    fns = fx.StepFns(model, lambda m, batch: m(batch.data).square().mean())
    loader = fx.shard(DataLoader(rows, batch_sampler=_Sized()), ctx, plan)
    found = [net.weight.item() for batch in loader if fx.step(ctx, batch, fns).applied]
    each = [[0, 1, 2], [3, 4, 5, 6], [7, 8]] if ctx.world_size == 1 else [[*range(7)], [7, 8, 0]]
    weight, wanted = 1.0, []
    for window in each:
        weight -= 0.5 * float((2 * weight * rows[window].square()).mean())
        wanted.append(weight)
    return found, wanted


def test_windows_of_unequal_batches_weigh_their_rows(clusters):
    for n in (1, 2):
        for found, wanted in clusters[n].run(_sized):
            assert found == pytest.approx(wanted, rel=1e-5)
