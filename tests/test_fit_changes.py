"""A run that is continued with another plan or other data."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import fxtrain as fx


class Batches(BatchSampler):
    """Not torch's own, so that a loader distributes its batches whole."""


def _fit(ctx, folder, *, updates, rows=12, batch=2, seed=3, shuffle=True, units=False, **plan):
    torch.manual_seed(0)
    plan = fx.Plan(seed=seed, **plan)
    model = fx.wrap(
        torch.nn.Linear(1, 1), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    data = torch.arange(rows, dtype=torch.float32)[:, None]
    if units:
        how = {"batch_sampler": Batches(RandomSampler(data), batch, drop_last=False)}
    else:
        how = {"batch_size": batch, "shuffle": shuffle}
    loader = fx.shard(DataLoader(data, **how), ctx, plan)
    return [r.position for r in fx.fit(ctx, fns, loader, folder, updates=updates, show=False)]


MOVED = {
    "rows": ({"rows": 10}, "rows or batches in an epoch 12 when it was saved, 10 now"),
    "seed": ({"seed": 4}, "order RandomSampler with seed 3 when it was saved, Ran.* seed 4 now"),
    "order": ({"shuffle": False}, "order RandomSampler with seed 3 .* SequentialSampler now"),
    "unit": ({"units": True}, "unit row when it was saved, batch now"),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_position_that_means_another_row_is_refused(ctx, tmp_path, name):
    how, words = MOVED[name]
    _fit(ctx, tmp_path, updates=3)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(fx.errors.DataError, match=words):
        _fit(ctx, tmp_path, updates=5, **how)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    _fit(ctx, tmp_path, updates=6)  # to the end of the epoch, where an epoch of other data begins
    assert _fit(ctx, tmp_path, updates=7, **how)[-1].epoch == 1


def test_other_data_is_one_line_and_another_plan_is_one(ctx, tmp_path, caplog):
    _fit(ctx, tmp_path, updates=3)
    with caplog.at_level("INFO"):
        _fit(ctx, tmp_path, updates=4)
    assert "continues on" not in caplog.text and "differs" not in caplog.text
    with caplog.at_level("INFO"):
        _fit(ctx, tmp_path, updates=5, batch=1, accumulate=2, clip_norm=1.0)
    assert "continues on other data: batch 2 → 1." in caplog.text
    assert caplog.text.count("accumulate") == 1  # `restore` has logged it


def test_a_loop_by_hand_is_told_which_changes_train_otherwise(ctx, tmp_path, caplog):
    def wrapped(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **plan):
        return fx.wrap(torch.nn.Linear(1, 1), ctx, fx.Plan(**plan), optimizer=optimizer)

    fx.save(tmp_path, ctx, wrapped(seed=1, batch="global"))
    with caplog.at_level("INFO"):
        fx.restore(tmp_path, ctx, wrapped(seed=1, batch="global", strategy="fsdp", mesh="shard=1"))
        fx.restore(tmp_path, ctx, wrapped(None, seed=2))  # it does not train
    assert not caplog.messages
    with caplog.at_level("INFO"):
        fx.restore(tmp_path, ctx, {"model": wrapped(seed=2, accumulate=2, precision="bf16")})
    (line,) = [message for message in caplog.messages if message.startswith("restore:")]
    assert line.startswith("restore: the plan of 'model' differs from that of")
    assert line.endswith(
        ": precision.compute 'fp32' → 'bf16'; accumulate 1 → 2; batch 'global' → 'per_rank'; "
        "seed 1 → 2."
    )


def test_the_windows_are_those_of_the_model(ctx, tmp_path):
    plan = fx.Plan(accumulate=3, flush=False)
    model = fx.wrap(
        torch.nn.Linear(1, 1), ctx, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    loader = fx.shard(DataLoader(torch.ones(10, 1), batch_size=1), ctx, fx.Plan(accumulate=2))
    reports = list(fx.fit(ctx, fns, loader, tmp_path, updates=4, show=False))
    assert [r.updates for r in reports] == [r.position.updates for r in reports]
    assert (len(reports), reports[-1].updates, reports[-1].applied) == (12, 4, True)
