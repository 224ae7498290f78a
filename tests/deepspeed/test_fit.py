"""`fit` under DeepSpeed: the hand-written loop, and a run in two pieces."""

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.trackers import read_run
from tests.deepspeed._ranks import grouped, mean, net, on_rank, rows, values

pytestmark = pytest.mark.deepspeed


def _made(ctx, plan):
    model = fx.wrap(net(), ctx, plan, optimizer=grouped)
    loader = fx.shard(DataLoader(rows(32), batch_size=8, shuffle=True), ctx, plan)
    return model, fx.StepFns(model=model, loss=mean), loader


@on_rank
def _by_hand(ctx, plan):
    model, fns, loader = _made(ctx, plan)
    for epoch in loader.epochs(3):
        for batch in epoch:
            fx.step(ctx, batch, fns)
    measured = fx.evaluate(ctx, model, DataLoader(rows(7), batch_size=2), mean)
    return values(model), measured


@on_rank
def _fitted(ctx, plan, folder):
    """Three epochs, stopped in the second."""
    for stop in (3, None):
        model, fns, loader = _made(ctx, plan)
        held_out = DataLoader(rows(7), batch_size=2)
        reports = fx.fit(
            ctx,
            fns,
            loader,
            folder,
            epochs=3,
            updates=stop,
            log_every=2,
            show=False,
            evaluate=lambda model=model, data=held_out: fx.evaluate(ctx, model, data, mean),
        )
        *_, report = reports
        found = values(model)
    return found, report.metrics


@pytest.mark.parametrize("stage", [1, 3])
def test_a_run_in_two_pieces_is_the_hand_written_loop(pair, tmp_path, stage):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage), batch="global", accumulate=2, clip_norm=1.0)
    wanted, measured = pair.run(_by_hand, plan)[0]
    for found, metrics in pair.run(_fitted, plan, str(tmp_path)):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        assert metrics == measured
    log = read_run(tmp_path)
    assert [step for step, _ in log.curve("loss")] == [2, 3, 4, 6]
    assert [step for step, _ in log.curve("eval")] == [2, 3, 4, 6]
    assert {"lr/0", "lr/1", "skipped", "memory_gib"} <= set(log.entries[1]["values"])
    assert all(value > 0 for _, value in log.curve("grad_norm"))
