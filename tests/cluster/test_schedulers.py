"""Schedulers over ranks: per update or per row, and what a plateau follows."""

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
from tests.cluster._small_nets import SGD, small_data, small_net, square_loss, train_small


def _scheduled(ctx, by):
    plan = fx.Plan(accumulate=2, schedule=by)
    seen = []

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: seen.append(n) or 1.0)

    train_small(ctx, plan, scheduler=scheduler, epochs=1)
    return seen[-1]


def test_schedulers_advance_once_per_update_or_per_sample(cluster):
    updates = -(-(32 // (4 * cluster.n)) // 2)
    assert cluster.run(_scheduled, "update") == [updates] * cluster.n
    assert cluster.run(_scheduled, "samples") == [32] * cluster.n


@pytest.fixture
def ctx():
    with fx.detect({}, device="cpu") as found:
        yield found


def _plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)


def _rates(ctx, metrics):
    """The learning rate after each epoch, whose metric differs between the ranks."""
    model = fx.wrap(
        small_net(), ctx, optimizer=SGD, scheduler=lambda opt: {"plateau": _plateau(opt)}
    )
    fns = fx.StepFns(model=model, loss=square_loss)
    loader = fx.shard(DataLoader(small_data(8), batch_size=4), ctx)
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
    model = fx.wrap(small_net(), ctx, optimizer=SGD, scheduler=scheduler)
    fns = fx.StepFns(model=model, loss=square_loss)
    for epoch in fx.shard(DataLoader(small_data(8), batch_size=4), ctx).epochs(2):
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
    model = fx.wrap(small_net(), ctx, optimizer=SGD)
    with pytest.raises(fx.StepError, match="no scheduler that follows a metric"):
        ops.schedule(1.0, model)
    model = fx.wrap(small_net(), ctx, optimizer=SGD, scheduler=_plateau)
    for metric in ("1.0", None, torch.ones(2)):
        with pytest.raises(fx.StepError, match="takes one number"):
            ops.schedule(metric, model)
