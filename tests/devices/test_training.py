"""Training on a device that is not the CPU: overflows, resumed runs, recomputed blocks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.testing import Transformer
from tests.devices._training import adam, parts

pytestmark = pytest.mark.timeout(300)


def _overflowing(ctx):
    """fp16 with a loss scale at which the first gradients overflow."""
    scale = fx.LossScale(initial=2.0**40, interval=1000)
    loader, fns = parts(ctx, fx.Plan(precision=fx.Precision(compute="fp16", scale=scale)))
    reports = [fx.step(ctx, batch, fns) for batch in loader]
    return [report.applied for report in reports], float(reports[-1].loss)


def test_an_overflow_of_fp16_skips_the_update(one):
    ((applied, loss),) = one.run(_overflowing)
    assert applied[0] is False and 0 < loss < 10


def _resumed(ctx, folder):
    """Losses of a run with dropout, and of one that resumes in the middle."""
    plan = fx.Plan(seed=3)
    module = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))
    loader, fns = parts(ctx, plan, module=module)
    losses = []
    for count, batch in enumerate(loader):
        report = fx.step(ctx, batch, fns)
        losses.append(float(report.loss))
        if count == 3:
            fx.save(folder, ctx, fns.model, position=report.position, background=True).result()
    again = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))
    loader, fns = parts(ctx, plan, module=again)
    position = fx.restore(fx.latest(folder), ctx, fns.model).position
    return losses[4:], [float(fx.step(ctx, batch, fns).loss) for batch in loader.at(position)]


def test_resumed_runs_draw_the_same_numbers_on_the_device(one, tmp_path):
    ((wanted, found),) = one.run(_resumed, str(tmp_path))
    assert wanted == found


def _blocks(ctx, recompute):
    plan = fx.Plan(recompute=("Block",) if recompute else ())
    tokens = torch.randint(0, 20, (16, 9))
    model = fx.wrap(Transformer(), ctx, plan, optimizer=adam)
    loader = fx.shard(DataLoader(tokens, batch_size=4), ctx, plan)

    def loss(model, batch):
        logits = model(batch.data[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch.data[:, 1:].flatten())

    fns = fx.StepFns(model=model, loss=loss)
    return [float(fx.step(ctx, batch, fns).loss) for batch in loader]


def test_recomputed_blocks_train_as_others(one):
    (plain,), (found,) = one.run(_blocks, False), one.run(_blocks, True)
    assert len(plain) == len(found) == 4
    assert all(0 < value < 10 for value in found)
