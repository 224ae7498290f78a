"""Collectives that are queued and matched by order alone: those of NCCL, and a replacement.

The replacement is "ordered" in shadow.cpp. A collective starts at once and waits for nobody; what
uses its result waits. Ranks whose collectives differ get each other's bytes.
"""

import json
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch import distributed as dist
from torch import nn

import fxtrain as fx
from fxtrain import ops
from fxtrain.ops.transport.exchange import CallState
from fxtrain.testing import LAWS, Terms
from tests.devices._device import differ_once_verified
from tests.devices.test_programs import PROGRAM, launch

pytestmark = pytest.mark.timeout(300)

few_or_many = pytest.mark.parametrize("many", [False, True], ids=["few", "many"])

PLANS = {
    "ddp": fx.Plan(strategy=fx.DDP()),
    "ddp, unused": fx.Plan(strategy=fx.DDP(unused_parameters=True)),
    "fsdp": fx.Plan(strategy=fx.FSDP()),
}


@pytest.mark.parametrize("name", PLANS)
def test_strategies_train_as_one_process_does(in_order, name):
    LAWS[0](in_order, PLANS[name], terms=Terms(exact=False))


def _offloaded(ctx):
    """Sums of weights that shards in host memory make up, and whether they are on the device."""
    plan = fx.Plan(strategy=fx.FSDP(min_params=1, offload=True), clip_norm=1.0)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
    fx.step(ctx, fx.batch(torch.ones(2, 4), ctx, plan), fns)
    whole = dict(fx.weights(model))
    with fx.gathered(model) as module:
        sums = [float(p.detach().sum()) for p in module.parameters()]
    assert sums == pytest.approx([float(value.sum()) for value in whole.values()])
    return sums, {value.device.type for value in whole.values()}


def test_shards_in_host_memory_are_gathered_by_a_group_of_the_device_alone(device_only):
    (sums, devices), other = device_only.run(_offloaded)
    assert (sums, devices) == other
    assert devices == {"shadow"}


def _sharded(ctx, strategy):
    plan = fx.Plan(strategy=strategy)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model, lambda model, batch: (model(batch.data) - 1).square().mean())
    x = torch.linspace(0, 1, 8).view(2, 4) + ctx.rank
    return [float(fx.step(ctx, fx.batch(x, ctx, plan), fns).loss) for _ in range(4)]


def test_sharded_parameters_train_as_replicas_do(queued, two):
    for pool in (queued, two):
        expected = pool.run(_sharded, fx.DDP())
        for got, wanted in zip(pool.run(_sharded, fx.FSDP(min_params=1)), expected, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)


def _order(ctx):
    """The values of two collectives that the ranks start in different orders."""
    long, short = torch.ones(6, device=ctx.device), torch.full((2,), 3.0, device=ctx.device)
    for tensor in (long, short) if ctx.rank == 0 else (short, long):
        dist.all_reduce(tensor, group=ctx.comm.group)
    return long.tolist(), short.tolist()


def test_ranks_that_differ_get_each_others_values(queued):
    assert queued.run(_order) == [
        ([4.0, 4.0, 1.0, 1.0, 1.0, 1.0], [4.0, 4.0]),
        ([4.0, 4.0, 1.0, 1.0, 1.0, 1.0], [4.0, 4.0]),
    ]


def _starts(ctx):
    """Seconds of the start, while the other rank is not there yet, and of the use of the result."""
    tensor = torch.ones(3, device=ctx.device)
    ops.barrier(ctx)
    if ctx.rank == 1:
        time.sleep(0.5)
    began = time.monotonic()
    dist.all_reduce(tensor, group=ctx.comm.group)
    started = time.monotonic()
    total = float(tensor.sum())
    return started - began, time.monotonic() - started, total


def test_the_host_waits_for_results_and_not_for_collectives(queued):
    (start, use, total), _ = queued.run(_starts)
    assert total == 6
    assert start < use
    assert use > 0.25


class _Trained:
    """Steps of DDP and, in each, a metric over all ranks."""

    def __init__(self, ctx):
        torch.manual_seed(0)
        plan = fx.Plan(strategy=fx.DDP())
        self.ctx, self.metrics = ctx, []
        self.model = fx.wrap(
            nn.Linear(4, 3), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
        )
        loss = lambda model, batch: (model(batch.data) - 1).square().mean()  # noqa: E731
        self.fns = fx.StepFns(model=self.model, loss=loss)
        self.batch = fx.batch(torch.full((2, 4), float(ctx.rank)), ctx, plan)

    def step(self, *, measured):
        report = fx.step(self.ctx, self.batch, self.fns)
        if measured:
            self.metrics.append(ops.reduce(report.loss, self.ctx, op="sum"))

    def weights(self):
        return [p.detach().cpu() for p in self.model.module.parameters()]


@contextmanager
def _as_many(ctx, many):
    """Let the ranks combine what they have, as many ranks do."""
    state = ctx.comm.slot(CallState)
    before, state.few = state.few, 1 if many else state.few
    try:
        yield
    finally:
        state.few = before


def _skipping(ctx, skips, many):
    with _as_many(ctx, many):
        return _skipping_one(ctx, skips)


def _skipping_one(ctx, skips):
    run = _Trained(ctx)
    for step in range(6):
        try:
            run.step(measured=not (skips and ctx.rank == 1 and step == 2))
        except fx.CollectiveError as error:
            if step == 3:
                run.step(measured=False)  # in which the other rank may be by now
            return step, str(error), run.weights()
    return 6, "", run.weights()


@few_or_many
def test_a_skipped_metric_is_named_and_mixes_with_no_gradient(in_order, many):
    whole = in_order.run(_skipping, False, many)
    assert [found[:2] for found in whole] == [(6, "")] * 2
    (step, text, left), (other_step, other, right) = in_order.run(_skipping, True, many)
    # Each learns that rank 1 made this call an update later: rank 1 in its next one, unless the
    # ranks have compared this one before it starts.
    assert step == 3 and other_step in (3, 4)
    assert text == other
    assert "rank 0: reduce(float32[]" in text
    assert "at test_queued.py:" in text
    assert "after 1 update\n" in text
    assert "after 2 updates" in text
    assert "FX301" in text
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def _different(ctx, many):
    with _as_many(ctx, many):
        text, seconds = differ_once_verified(ctx)
        # The next call opens another communicator.
        total = float(ops.reduce(torch.ones(4, device=ctx.device), ctx, op="sum")[0])
        return text, seconds, total, ops.gather_objects(ctx.rank, ctx)


@few_or_many
def test_a_rank_that_waits_for_its_device_learns_of_another_call(in_order, many):
    (text, seconds, total, ranks), (other, *_) = in_order.run(_different, many)
    assert text == other
    assert "rank 0: reduce(float32[4]" in text
    assert "rank 1: barrier()" in text
    assert seconds < in_order.timeout_s / 2
    assert (total, ranks) == (2.0, [0, 1])


def _at_the_end(ctx, many):
    """A context in which rank 1 skips the last call."""
    x = torch.ones(4, device=ctx.device)
    try:
        with (
            fx.detect(device=ctx.device, timeout_s=ctx.comm.timeout_s) as inner,
            _as_many(inner, many),
        ):
            ops.reduce(x, inner, op="sum")
            if ctx.rank == 0:
                ops.reduce(x, inner, op="sum")
    except fx.CollectiveError as error:
        return str(error)
    return ""


@few_or_many
def test_a_last_call_that_a_rank_skips_is_an_error_of_closing(in_order, many):
    text, none = in_order.run(_at_the_end, many)
    assert none == ""
    assert text.startswith("reduce(float32[4]@device, sum)")
    assert "FX302" in text


def _threads(ctx, many):
    """Threads of deferred comparisons of a context: after several calls, and after closing."""
    x, before = torch.ones(4, device=ctx.device), {*threading.enumerate()}

    def started():
        return [t.name for t in {*threading.enumerate()} - before if t.name == "fxtrain-deferred"]

    with (
        fx.detect(device=ctx.device, timeout_s=ctx.comm.timeout_s) as inner,
        _as_many(inner, many),
    ):
        for _ in range(5):
            total = ops.reduce(x, inner, op="sum")
        assert float(total[0]) == 2
        during = len(started())
    return during, len(started())


@few_or_many
def test_deferred_comparisons_take_one_thread_which_ends_with_the_context(in_order, many):
    assert in_order.run(_threads, many) == [(1, 0)] * 2


def _exhausted(ctx, strategy):
    """A size at which one rank runs out of memory before backward, and losses of training later."""
    plan, sizes = fx.Plan(strategy=strategy), []

    def parts(plan):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        model = fx.wrap(net, ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        return model, fx.batch(torch.ones(2, 4) * (ctx.rank + 1), ctx, plan)

    def trial(size, plan):
        sizes.append(size)

        def loss(model, batch):
            value = model(batch.data).square().mean()
            if size > 2 and ctx.is_last:
                raise torch.OutOfMemoryError
            return value

        model, batch = parts(plan)
        fx.step(ctx, batch, fx.StepFns(model, loss))
        for parameter in model.module.parameters():
            float(
                getattr(parameter, "_local_tensor", parameter).detach().sum()
            )  # waits for the update

    began = time.monotonic()
    size, _ = fx.tuning.find_batch_size(ctx, trial, 8, plan)
    seconds = time.monotonic() - began
    model, batch = parts(plan)
    fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
    losses = [float(fx.step(ctx, batch, fns).loss) for _ in range(3)]
    return size, sizes, seconds, float(ops.reduce(sum(losses), ctx, op="mean"))


@pytest.mark.parametrize("strategy", [fx.DDP(), fx.FSDP(min_params=1)], ids=["ddp", "fsdp"])
def test_a_batch_size_is_found_where_one_rank_runs_out_of_memory(in_order, strategy):
    found = in_order.run(_exhausted, strategy)
    for size, sizes, seconds, loss in found:
        assert (size, sizes) == (2, [8, 4, 2])
        assert seconds < in_order.timeout_s / 2
        assert loss == found[0][3] and 0 < loss < 10


@pytest.mark.shadow
def test_a_rank_that_waits_for_its_device_restarts_with_the_others():
    ended = launch(PROGRAM, "restarted", "shadow", ranks=2)
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    first, second = told["losses"]
    assert len(second) == 4 and first[:2] == second[:2]
    assert told["share_of_timeout"] < 0.5
