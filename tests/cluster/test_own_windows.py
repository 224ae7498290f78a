"""What a model counts: its updates and micro-batches, in reports, checkpoints and warnings."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx

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


@pytest.mark.parametrize("stop", [4, 7, 13])
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
