"""Ranks that compute for longer than the others are named, and those that wait are not."""

import io
import logging
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.curves import read_curves
from fxtrain.curves.page import page_of
from fxtrain.ops.transport import exchange, messages, pace
from fxtrain.ops.transport.pace import KEPT, Pace
from tests._clock import Clock, measure_anew
from tests._slow import slow_after

SLOW_S = 0.01
WHERE = ("loss", "data", "optimizer")


class _Slow(torch.optim.SGD):
    compute = staticmethod(lambda: None)

    def step(self, closure=None):
        self.compute()
        return super().step(closure)


@contextmanager
def _clock():
    """The clock of this rank, on which nothing takes time but what a test says."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "time", clock)
        patch.setattr(exchange, "time", clock)
        patch.setattr(messages, "time", clock)
        yield clock


def _train(ctx, strategy, where, slow, updates, folder=None):
    """Updates in which some ranks take long in a place; the names of slow ranks, and times."""
    measure_anew(ctx)
    plan = fx.Plan(strategy=strategy)
    torch.manual_seed(0)

    def compute(place):
        if ctx.rank in slow and place == where:
            clock.sleep(SLOW_S)

    def optimizer(params):
        made = _Slow(params, lr=0.1)
        made.compute = lambda: compute("optimizer")
        return made

    def loss(model, batch):
        compute("loss")
        return model(batch.data).square().mean()

    with _clock() as clock:
        model = fx.wrap(nn.Linear(4, 1), ctx, plan, optimizer=optimizer)
        fns = fx.StepFns(model, loss)
        loader = fx.shard(DataLoader(torch.ones(64 * ctx.world_size, 4), batch_size=1), ctx, plan)
        if folder is not None:
            for _ in fx.fit(
                ctx, fns, loader, folder, updates=updates, save_epochs=False, show=False
            ):
                compute("data")
        else:
            for update, batch in enumerate(loader.updates(updates)):
                compute("data")
                report = fx.step(ctx, batch, fns)
                if update % 10 == 9:
                    fx.ops.reduce(report.loss, ctx)
    mine = ctx.comm.slot(Pace)
    return sorted(mine.slow), mine.micros, [str(one) for one in mine.slow.values()]


@pytest.mark.parametrize("where", slow_after(1, WHERE))
def test_a_slow_rank_is_named(clusters, where):
    found = clusters[4].run(_train, fx.DDP(), where, (2,), 4 * KEPT)
    assert found[0][0] == [2]
    assert all(slow == [] for slow, *_ in found[1:])  # rank 0 names them, for all
    assert "'device': 'cpu'" in found[0][2][0]
    assert [micros for _, micros, _ in found] == [1, 1, SLOW_S * 1e6, 1]


@pytest.mark.slow
def test_a_slow_rank_is_named_under_fsdp(pair):
    found = pair.run(_train, fx.FSDP(min_params=1), "optimizer", (1,), 3 * KEPT)
    assert found[0][0] == [1]


@pytest.mark.parametrize("where", slow_after(1, WHERE))
def test_nobody_is_named_where_all_are_equally_slow(pair, where):
    found = pair.run(_train, fx.DDP(), where, (0, 1), 3 * KEPT)
    assert [slow for slow, *_ in found] == [[], []]
    assert [micros for _, micros, _ in found] == [SLOW_S * 1e6] * 2


def _wait_for(ctx, late):
    """Steps around a collective for which one rank is late, and the others wait there."""
    measure_anew(ctx)
    model = fx.wrap(nn.Linear(4, 1), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
    batch = fx.batch(torch.ones(2, 4), ctx)
    complete = exchange._complete

    def wait(*args):
        clock.sleep(0.0 if ctx.rank == late else SLOW_S)
        return complete(*args)

    with _clock() as clock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_complete", wait)
        for _ in range(KEPT):
            fx.step(ctx, batch, fns)
            if ctx.rank == late:
                clock.sleep(SLOW_S)
            fx.ops.reduce(torch.ones(()), ctx)
            fx.ops.gather_objects(ctx.rank, ctx)
    waited = SLOW_S * KEPT if ctx.rank != late else 0.0
    assert ctx.comm.slot(Pace).waited_s >= waited
    return ctx.comm.slot(Pace).micros


def test_time_in_collectives_is_not_computing(pair):
    counted = KEPT - pace._DROPPED  # of which the first has no loop before it
    assert pair.run(_wait_for, 1) == [1, round(1e6 * SLOW_S * (counted - 1) / counted)]


@pytest.mark.slow
def test_a_slow_rank_is_in_the_log_and_in_the_report(pair, tmp_path):
    text = pair.run(_logged, str(tmp_path))[0]
    assert text.count("computes for") == 1
    assert "Rank 1 on " in text
    assert "(cpu) computes for" in text
    table = read_curves([tmp_path])[0].tables["slow ranks"]
    (row,) = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    assert (row["rank"], row["device"]) == (1, "cpu")
    assert (row["ms per step"], row["median of ranks"]) == (1000 * SLOW_S, 0.0)
    assert "slow ranks" in page_of(read_curves([tmp_path]))


def _logged(ctx, folder):
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    logging.getLogger("fxtrain.ranks").addHandler(handler)
    try:
        _train(ctx, fx.DDP(), "loss", (1,), 4 * KEPT, folder)
    finally:
        logging.getLogger("fxtrain.ranks").removeHandler(handler)
    return lines.getvalue()


def test_one_rank_keeps_no_pace():
    with fx.detect(env={}, device="cpu") as ctx:
        fx.wrap(nn.Linear(2, 1), ctx)
        assert Pace not in ctx.comm.state.slots
