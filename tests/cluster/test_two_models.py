"""Two models that train each other: a window sums what was computed in it, and nothing else."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
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
    [*((name, "step") for name in WINDOWS), ("ddp", "update"), ("fsdp, kept whole", "update")],
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
