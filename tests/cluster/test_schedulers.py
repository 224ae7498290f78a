"""Schedulers over ranks: per update or per row, and what a plateau follows."""

import logging
import re

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
from tests._errors import raises_code
from tests._slow import slow_after
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
    assert cluster.run(_scheduled, "ranks") == [updates * cluster.n] * cluster.n


def _by_epoch(ctx, plan, parts, folder=None):
    """The rate in each of three epochs of a run, which may stop in the second and continue."""
    rates, stop = [], (1, 1)
    for _ in range(2 if folder else 1):
        made = lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)  # noqa: E731
        model = fx.wrap(small_net(), ctx, plan, optimizer=SGD, scheduler=made)
        loader = fx.shard(DataLoader(small_data(20), batch_size=2), ctx, plan)
        if folder and rates:
            loader = loader.at(fx.restore(folder, ctx, model).position)
        for epoch in loader.epochs(3):
            for number, batch in enumerate(epoch):
                rates.append((epoch.number, model.optimizer.param_groups[0]["lr"]))
                if parts:
                    fx.ops.backward(square_loss(model, batch), model, batch)
                    fx.ops.apply(model)
                else:
                    fx.step(ctx, batch, fx.StepFns(model, square_loss))
                if folder and (epoch.number, number) == stop:
                    break
            if folder and (epoch.number, number) == stop:
                fx.save(folder, ctx, model, position=batch.position)
                stop = None
                break
    return rates


@pytest.mark.parametrize("parts", [False, True], ids=["step", "parts"])
@pytest.mark.parametrize(
    "how", slow_after(1, [{}, {"flush": False}, {"clip_norm": 1.0, "nonfinite": "skip"}])
)
def test_schedulers_advance_at_the_end_of_an_epoch(clusters, tmp_path, how, parts):
    plan = fx.Plan(accumulate=3, schedule="epoch", **how)
    for ranks, folder in ((1, None), (2, None), (1, str(tmp_path / "run"))):
        for rates in clusters[ranks].run(_by_epoch, plan, parts, folder):
            first = rates[0][1]
            assert {number for number, _ in rates} == {0, 1, 2}
            assert all(rate == first * 0.5**number for number, rate in rates)


def _stepped_twice(ctx):
    made = lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)  # noqa: E731
    plan = fx.Plan(schedule="epoch")
    model = fx.wrap(small_net(), ctx, plan, optimizer=SGD, scheduler=made)
    for epoch in fx.shard(DataLoader(small_data(8), batch_size=2), ctx, plan).epochs(2):
        for batch in epoch:
            fx.step(ctx, batch, fx.StepFns(model, square_loss))
        model.scheduler.step()


def test_a_loop_that_advances_them_as_well_is_refused(ctx):
    with raises_code("FX500", "Plan(schedule='epoch')"):
        _stepped_twice(ctx)


def test_epochs_are_not_known_without_a_batch(ctx):
    made = lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)  # noqa: E731
    plan = fx.Plan(schedule="epoch")
    model = fx.wrap(small_net(), ctx, plan, optimizer=SGD, scheduler=made)
    with raises_code("FX500", "fx.ops.backward"):
        fx.ops.backward(model(small_data(2)[:][0]).sum(), model)


def _to_the_end(ctx, kind, rows, batch="per_rank"):
    """The rate after two epochs, of a scheduler made for the loader before it was sharded."""
    plan = fx.Plan(schedule="ranks", batch=batch)
    torch_loader = DataLoader(small_data(rows), batch_size=4)
    total = len(torch_loader) * 2
    made = {
        "cosine": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, total),
        "one cycle": lambda opt: torch.optim.lr_scheduler.OneCycleLR(opt, 1.0, total_steps=total),
    }
    model = fx.wrap(small_net(), ctx, plan, optimizer=SGD, scheduler=made[kind])
    loader = fx.shard(torch_loader, ctx, plan)
    fns = fx.StepFns(model=model, loss=square_loss)
    for epoch in loader.epochs(2):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    return model.scheduler.last_epoch, model.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("batch", ["per_rank", "global"])
def test_a_scheduler_made_for_the_unsharded_loader_comes_to_its_end(pair, batch):
    for steps, rate in pair.run(_to_the_end, "cosine", 32, batch):
        assert (steps, rate) == (16, pytest.approx(0, abs=1e-9))


def test_batches_of_padding_do_not_step_past_the_end_of_one_cycle(pair):
    assert {steps for steps, _ in pair.run(_to_the_end, "one cycle", 28)} == {14}


def _logged(ctx, folder, schedule, name, length, how):
    """What a run of eight epochs of four updates logs about its scheduler."""
    plan = fx.Plan(schedule=schedule)
    kinds = {
        "CosineAnnealingLR": lambda opt: torch.optim.lr_scheduler.CosineAnnealingLR(opt, length),
        "LambdaLR": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0),
        "two alike": lambda opts: [kinds["CosineAnnealingLR"](opt) for opt in opts],
    }
    optimizer = (lambda params: [SGD([p]) for p in params]) if name == "two alike" else SGD
    model = fx.wrap(small_net(), ctx, plan, optimizer=optimizer, scheduler=kinds[name])
    loader = fx.shard(DataLoader(small_data(), batch_size=4), ctx, plan)
    fns = fx.StepFns(model=model, loss=square_loss)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("fxtrain.run")
    logger.addHandler(handler)
    try:
        if how == "fit":
            for _ in fx.fit(ctx, fns, loader, path=folder, updates=32, show=False):
                pass
        elif how == "updates":
            for batch in loader.updates(32):
                fx.step(ctx, batch, fns)
        else:
            for epoch in loader.epochs(8):
                for batch in epoch:
                    fx.step(ctx, batch, fns)
    finally:
        logger.removeHandler(handler)
    return [text for text in records if "length" in text]


@pytest.mark.parametrize(
    ("schedule", "name", "length", "how", "says"),
    slow_after(
        4,
        [
            ("update", "CosineAnnealingLR", 64, "epochs", "schedule='ranks'.*steps it 2 times"),
            ("update", "CosineAnnealingLR", 64, "fit", "makes 32 under.*steps it 2 times"),
            ("update", "CosineAnnealingLR", 64, "updates", "T_max=32.*steps it 2 times"),
            ("update", "CosineAnnealingLR", 20, "epochs", "length of 20 steps.*T_max=32"),
            ("update", "two alike", 20, "epochs", "length of 20 steps.*T_max=32"),
            ("update", "CosineAnnealingLR", 33, "epochs", None),
            ("ranks", "CosineAnnealingLR", 64, "epochs", None),
            ("update", "LambdaLR", 64, "epochs", None),
            ("samples", "CosineAnnealingLR", 32, "epochs", "makes 256 under"),
            ("epoch", "CosineAnnealingLR", 8, "epochs", None),
            (
                "epoch",
                "CosineAnnealingLR",
                32,
                "epochs",
                "makes 8 under.*T_max=8, the number of epo",
            ),
        ],
    ),
)
def test_a_length_that_is_not_that_of_the_run_is_logged_once(
    pair, tmp_path, schedule, name, length, how, says
):
    first, second = pair.run(_logged, str(tmp_path), schedule, name, length, how)
    assert second == []
    if says is None:
        assert first == []
    else:
        (line,) = first
        assert re.search(says, line), line


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
    with raises_code("FX500", "schedule"):
        ops.schedule(1.0, model)
    model = fx.wrap(small_net(), ctx, optimizer=SGD, scheduler=_plateau)
    for metric in ("1.0", None, torch.ones(2)):
        with raises_code("FX500", "schedule"):
            ops.schedule(metric, model)
