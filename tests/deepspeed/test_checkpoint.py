"""Stopping and going on under DeepSpeed: bit for bit, at other numbers of ranks, elsewhere."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.testing import count_collectives
from tests.deepspeed._ranks import (
    adamw,
    grouped,
    mean,
    net,
    on_rank,
    rows,
    train,
    values,
    whole_state,
)

pytestmark = pytest.mark.deepspeed


def _run(ctx, plan, path, *, save_at=None, resume=False):
    """Train two epochs; save after some updates, or start from what was saved."""
    model = fx.wrap(
        net(), ctx, plan, optimizer=grouped,
        scheduler=lambda opt: torch.optim.lr_scheduler.ExponentialLR(opt, 0.9),
    )  # fmt: skip
    loader = fx.shard(DataLoader(rows(32), batch_size=8, shuffle=True), ctx, plan)
    if resume:
        loader = loader.at(fx.restore(path, ctx, model).position)
    fns = fx.StepFns(model=model, loss=mean)
    losses = []
    for epoch in loader.epochs(2):
        for batch in epoch:
            report = fx.step(ctx, batch, fns)
            losses.append(float(report.loss))
            if report.applied and report.position.updates == save_at:
                fx.save(path, ctx, model, position=report.position)
    return losses, values(model)


@on_rank
def _stopped_and_resumed(ctx, plan, folder):
    whole = _run(ctx, plan, folder, save_at=3)
    rest = _run(ctx, plan, folder, resume=True)
    return whole, rest


PLANS = {
    "stage 0": fx.DeepSpeed(stage=0),
    "stage 1": fx.DeepSpeed(stage=1),
    "stage 2": fx.DeepSpeed(stage=2),
    "stage 3": fx.DeepSpeed(stage=3),
    "offloaded": fx.DeepSpeed(stage=2, offload_optimizer="cpu"),
    "offloaded at 3": fx.DeepSpeed(stage=3, offload_optimizer="cpu", offload_parameters="cpu"),
}


# The plain stages in fp32 go on by the law.
@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "bf16") for name in PLANS), ("offloaded", "fp32"), ("offloaded at 3", "fp32")],
)
def test_a_resumed_run_is_the_same_bit_for_bit(pair, tmp_path, name, precision):
    plan = fx.Plan(strategy=PLANS[name], precision=precision, batch="global", accumulate=2)
    for (losses, got), (rest, again) in pair.run(_stopped_and_resumed, plan, str(tmp_path)):
        assert len(rest) == 2 and losses[-2:] == rest
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@on_rank
def _first(ctx, plan, folder):
    return _run(ctx, plan, folder, save_at=3)[1]


@on_rank
def _second(ctx, plan, folder):
    return _run(ctx, plan, folder, resume=True)[1]


@pytest.mark.parametrize(
    ("saved", "resumed", "ranks"),
    [
        (fx.DeepSpeed(stage=2), fx.DeepSpeed(stage=2), 4),
        (fx.DeepSpeed(stage=3), fx.DeepSpeed(stage=3), 1),
        # Where the last ranks have nothing of the smallest parameter.
        (fx.DeepSpeed(stage=2), fx.DeepSpeed(stage=3, persistence_threshold=0), 4),
        (fx.DeepSpeed(stage=1), fx.DeepSpeed(stage=3), 2),
        (fx.DeepSpeed(stage=3), fx.DDP(), 1),
        (fx.DDP(), fx.DeepSpeed(stage=2), 2),
    ],
)
def test_a_run_goes_on_elsewhere(pair, clusters, tmp_path, saved, resumed, ranks):
    fields = {"batch": "global", "accumulate": 2}
    wanted = pair.run(_first, fx.Plan(strategy=saved, **fields), str(tmp_path))[0]
    if isinstance(saved, fx.DeepSpeed):  # the config that the engine got is kept with the plan
        manifest = json.loads((Path(fx.latest(tmp_path)) / "manifest.json").read_text())
        settings = manifest["manifest"]["models"]["model"]["values"]["settings"]
        assert settings["zero_optimization"]["stage"] == saved.stage
    plan = fx.Plan(strategy=resumed, **fields)
    for got in clusters[ranks].run(_second, plan, str(tmp_path)):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@on_rank
def _parts(ctx, stage, folder):
    """Elements of parameters and states that this rank gives, of how many, and what it sends."""
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=stage), precision="bf16")
    model, _ = train(ctx, plan, adamw, epochs=1)
    with count_collectives() as traffic:
        state = model.strategy.state(model)
    cut = [one for one in state.tensors.values() if isinstance(one, fx.state.FlatShard)]
    fx.save(folder, ctx, model, position=fx.Position(updates=1))
    values(model)
    total = sum(math.prod(one.shape) for one in cut)
    return sum(len(one.values) for one in cut), total, traffic.counts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_rank_saves_what_it_holds(pair, tmp_path, stage):
    for held, total, traffic in pair.run(_parts, stage, str(tmp_path)):
        assert total == 3 * 210 and 0 < held <= 0.55 * total
        assert not traffic
    sizes = [file.stat().st_size for file in Path(fx.latest(tmp_path)).glob("*.safetensors")]
    assert len(sizes) == 2 and max(sizes) < 1.5 * min(sizes)


@on_rank
def _in_a_window(ctx, folder):
    plan = fx.Plan(strategy=fx.DeepSpeed(stage=1), accumulate=3)
    model = fx.wrap(net(), ctx, plan, optimizer=adamw)
    fns = fx.StepFns(model=model, loss=mean)
    batch = next(iter(fx.shard(DataLoader(rows(), batch_size=4), ctx, plan)))
    fx.step(ctx, batch, fns)
    try:
        fx.save(folder, ctx, model, position=batch.position)
    except fx.CheckpointError as error:
        return str(error)
    return ""


def test_an_open_window_is_not_saved(pair, tmp_path):
    for message in pair.run(_in_a_window, str(tmp_path)):
        assert "after the next update" in message


class _Spare(nn.Module):
    """With a layer that no forward uses, so that it has no state of its own."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = net(), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


@on_rank
def _to_flat_lists(ctx, stage, folder, later):
    """States of replicas, and those that DeepSpeed takes over."""
    plan = fx.Plan(strategy=fx.DDP(unused_parameters=True))
    model = fx.wrap(_Spare(), ctx, plan, optimizer=adamw)
    batch = next(iter(fx.shard(DataLoader(rows(), batch_size=4), ctx, plan)))
    fx.step(ctx, batch, fx.StepFns(model=model, loss=mean))
    if later:
        model.optimizer.state[model.module.used[0].bias]["step"].fill_(5)
    fx.save(folder, ctx, model, position=batch.position)
    before, _ = whole_state(ctx, model)
    other = fx.wrap(_Spare(), ctx, fx.Plan(strategy=fx.DeepSpeed(stage=stage)), optimizer=adamw)
    fx.restore(folder, ctx, other)
    after, _ = whole_state(ctx, other)
    values(other)
    return before, after


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_without_states_and_with_other_counts(pair, tmp_path, stage, later):
    for before, after in pair.run(_to_flat_lists, stage, str(tmp_path), later):
        for name, value in before.items():
            if not name.endswith(".step"):
                assert torch.equal(after[name].view(value.shape), value), name
        spare = [value for name, value in after.items() if "optimizer.0.spare" in name]
        assert all(not value.any() for value in spare if value.dim())
        steps = {float(value) for name, value in after.items() if name.endswith(".step")}
        assert steps == ({1.0, 5.0} if later and stage == 0 else {5.0} if later else {1.0})
