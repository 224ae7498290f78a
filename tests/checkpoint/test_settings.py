"""Options of optimizers and schedulers that a script changes before a restart."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import fxtrain as fx
from tests._errors import raises_code
from tests._slow import slow_after

STOP, END = 3, 7
ROWS = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
SCHEDULERS = {
    "none": None,
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 9, eta_min=0.01),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, o.param_groups[0]["lr"], total_steps=9),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "in sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)],
        [2],
    ),
    "two": lambda o: [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2, gamma=0.5)],
}


def _made(ctx, lr, scheduler, plan=None, **options):
    torch.manual_seed(0)
    plan = plan or fx.Plan()
    model = fx.wrap(
        nn.Linear(2, 1),
        ctx,
        plan,
        optimizer=lambda p: torch.optim.SGD(p, lr=lr, **{"momentum": 0.9, **options}),
        scheduler=scheduler,
    )
    loader = fx.shard(DataLoader(ROWS, batch_size=2), ctx, plan)
    return fx.StepFns(model, lambda m, b: m(b.data).square().mean()), loader


def _rates(ctx, fns, loader, updates):
    """The learning rate of each update, and the last position."""
    rates, position = [], loader.position
    for batch in loader.updates(updates):
        rates.append(fns.model.optimizer.param_groups[0]["lr"])
        position = fx.step(ctx, batch, fns).position
    return rates, position


def _trained(ctx, lr, kind, updates, plan=None):
    return _rates(ctx, *_made(ctx, lr, SCHEDULERS[kind], plan), updates)[0]


def _saved(ctx, folder, lr, kind, plan=None):
    fns, loader = _made(ctx, lr, SCHEDULERS[kind], plan)
    _, position = _rates(ctx, fns, loader, STOP)
    fx.save(folder, ctx, fns.model, position=position)


def _restored(ctx, folder, lr, kind, settings, plan=None):
    """The rates of a run that continues, and the momentum with which it does."""
    fns, loader = _made(ctx, lr, SCHEDULERS[kind], plan)
    position = fx.restore(folder, ctx, fns.model, settings=settings).position
    states = fns.model.optimizer.state.values()
    momentum = [bool(one["momentum_buffer"].any()) for one in states]
    return _rates(ctx, fns, loader.at(position), END)[0], all(momentum)


def _said(caplog):
    return [line for line in caplog.messages if line.startswith("restore: options of")]


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_rates_are_those_of_the_side_that_was_chosen(ctx, tmp_path, caplog, kind):
    of = {lr: _trained(ctx, lr, kind, END)[STOP:] for lr in (0.1, 0.5)}
    _saved(ctx, tmp_path, 0.1, kind)
    for settings, lr in (("checkpoint", 0.1), ("script", 0.5)):
        caplog.clear()
        with caplog.at_level("INFO"):
            assert _restored(ctx, tmp_path, 0.5, kind, settings) == (of[lr], True)
        (line,) = _said(caplog)
        name = "lr" if kind == "none" else "initial_lr"
        rate = r"0\.[0-9]+ → 0\.[0-9]+"
        assert re.search(rf"differ from the script's \(SGD 0, group 0: {name} {rate}", line)
        assert f"and those of the {settings} are used." in line
        assert ("restore_settings=" in line) == (settings == "checkpoint")
        caplog.clear()
        with caplog.at_level("INFO"):
            assert _restored(ctx, tmp_path, 0.1, kind, settings) == (of[0.1], True)
        assert not _said(caplog)


PLANS = [
    fx.Plan(),
    fx.Plan(strategy=fx.FSDP(min_params=1)),
    fx.Plan(strategy=fx.DDP(shard_optimizer=True)),
]


@pytest.mark.parametrize("plan", slow_after(1, PLANS), ids=str)
def test_the_rates_of_ranks_are_those_of_the_script(pair, tmp_path, plan):
    wanted = pair.run(_trained, 0.5, "cosine", END, plan)
    pair.run(_saved, str(tmp_path), 0.1, "cosine", plan)
    found = pair.run(_restored, str(tmp_path), 0.5, "cosine", "script", plan)
    assert [rates for rates, _ in found] == [rates[STOP:] for rates in wanted]


def test_a_run_that_keeps_its_settings_says_so_at_each_start(ctx, tmp_path, caplog):
    def start(lr, updates, **how):
        fns, loader = _made(ctx, lr, None)
        caplog.clear()
        with caplog.at_level("INFO"):
            for _ in fx.fit(ctx, fns, loader, tmp_path, updates=updates, show=False, **how):
                pass
        said = re.findall(r"lr ([0-9.]+ → [0-9.]+)", " ".join(_said(caplog)))
        return fns.model.optimizer.param_groups[0]["lr"], said

    assert start(0.1, 1) == (0.1, [])
    assert start(0.5, 2) == (0.1, ["0.1 → 0.5"])
    assert start(0.5, 3) == (0.1, ["0.1 → 0.5"])
    assert start(0.1, 4) == (0.1, [])
    assert start(0.5, 5, restore_settings="script") == (0.5, ["0.1 → 0.5"])
    assert start(0.5, 6) == (0.5, [])
    assert start(0.1, 7) == (0.5, ["0.5 → 0.1"])


def test_any_option_of_a_group_or_scheduler_is_compared(ctx, tmp_path, caplog):
    def step_lr(size):
        return lambda o: lr_scheduler.StepLR(o, size)

    fns, _ = _made(ctx, 0.1, step_lr(2))
    fx.save(tmp_path, ctx, fns.model)
    fns, _ = _made(ctx, 0.1, step_lr(3), weight_decay=0.5, nesterov=True)
    with caplog.at_level("INFO"):
        fx.restore(tmp_path, ctx, fns.model, settings="script")
    (line,) = caplog.messages
    for words in ("weight_decay 0 → 0.5", "nesterov False → True", "StepLR 0: step_size 2 → 3"):
        assert words in line
    assert fns.model.scheduler.step_size == 3
    assert fns.model.optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize("kind", [np.float64, np.float32, torch.tensor])
def test_rates_of_other_types_are_compared_too(ctx, tmp_path, caplog, kind):
    fns, _ = _made(ctx, kind(0.5), None)
    fx.save(tmp_path, ctx, fns.model)
    for lr, lines in ((0.5, 0), (0.25, 1)):
        fns, _ = _made(ctx, kind(lr), None)
        caplog.clear()
        with caplog.at_level("INFO"):
            fx.restore(tmp_path, ctx, fns.model)
        assert ["lr 0.5 → 0.25" in line for line in _said(caplog)] == [True] * lines


def test_a_scheduler_that_follows_a_metric_keeps_its_counts(ctx, tmp_path):
    def plateau(patience):
        return lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=patience, factor=0.5)

    fns, _ = _made(ctx, 0.1, plateau(1))
    for metric in (1.0, 2.0, 3.0, 4.0):
        fx.ops.schedule(metric, fns.model)
    assert fns.model.optimizer.param_groups[0]["lr"] == 0.05
    fx.save(tmp_path, ctx, fns.model)
    fns, _ = _made(ctx, 0.4, plateau(2))
    fx.restore(tmp_path, ctx, fns.model, settings="script")
    scheduler = fns.model.scheduler
    assert (scheduler.best, scheduler.num_bad_epochs, scheduler.patience) == (1.0, 1, 2)
    rates = []
    for metric in (5.0, 6.0):
        fx.ops.schedule(metric, fns.model)
        rates.append(fns.model.optimizer.param_groups[0]["lr"])
    assert rates == [0.4, 0.2]


class _Uncounted(lr_scheduler.LambdaLR):
    def state_dict(self):
        return {name: x for name, x in super().state_dict().items() if name != "last_epoch"}


def test_what_cannot_be_chosen_is_refused(ctx, tmp_path):
    fns, _ = _made(ctx, 0.1, lambda o: _Uncounted(o, lambda n: 1.0))
    fx.save(tmp_path, ctx, fns.model)
    with raises_code("FX600", "_Uncounted"):
        fx.restore(tmp_path, ctx, fns.model, settings="script")
    with raises_code("FX600", "settings='mine'", "'checkpoint'"):
        fx.restore(tmp_path, ctx, fns.model, settings="mine")
    with raises_code("FX200", "fit(restore_settings='mine')"):
        fx.fit(ctx, fns, _made(ctx, 0.1, None)[1], tmp_path, updates=1, restore_settings="mine")
