"""Saves in the background: what is copied late, who waits for it, and who hears of failure."""

import os
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint import host_copies
from fxtrain.checkpoint import saving as implementation
from fxtrain.checkpoint.write_plan import writable_chunks
from tests.checkpoint import _runs


def _model(ctx, net=None):
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)) if net is None else net
    model = fx.wrap(net, ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
    _step(model)
    return model


def _step(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in model.optimizers:
        optimizer.step()


def _stage(ctx, model):
    state = model.strategy.state(model)
    steady = {name: state.tensors[name] for name in state.constant_between_steps}
    with _runs.all_late():
        return host_copies.stage(ctx, [*writable_chunks(state.tensors).values()], steady)


@contextmanager
def _held():
    """Saves do not get to their files until the block sets the event."""
    go, write = threading.Event(), implementation.write_file

    def wait_and_write(*args):
        assert go.wait(20)
        return write(*args)

    implementation.write_file = wait_and_write
    try:
        with _runs.all_late():
            yield go
    finally:
        go.set()
        implementation.write_file = write


@pytest.fixture
def ctx():
    with fx.detect(env={}, device="cpu") as found:
        yield found


def test_only_what_optimizers_change_is_copied_late(ctx):
    net = nn.ModuleDict(
        {
            "trained": nn.Linear(2, 2, bias=False),
            "frozen": nn.Linear(2, 2).requires_grad_(False),
            "scaled": nn.Embedding(4, 2, max_norm=1.0),
            "norm": nn.BatchNorm1d(2, affine=False),
        }
    )
    state = (model := _model(ctx, net)).strategy.state(model)
    held = {f"optimizer.0.{name}.weight.momentum_buffer" for name in ("trained", "scaled")}
    assert state.constant_between_steps == {"module.trained.weight", *held}
    assert (
        not fx.wrap(nn.Linear(2, 2), ctx).strategy.state(model).constant_between_steps
        - state.constant_between_steps
    )
    assert not host_copies._deferrable([*writable_chunks(state.tensors).values()], {}, pinned=False)


def test_the_optimizers_next_step_waits_for_the_copy(ctx):
    model = _model(ctx)
    before = {name: t.clone() for name, t in model.strategy.state(model).tensors.items()}
    staging = _stage(ctx, model)
    staging.hold(model.optimizers)
    made = staging._made
    # The thread gets its turn when the step waits, and not earlier.
    waited = SimpleNamespace(wait=lambda: staging._make(), set=made.set)
    object.__setattr__(staging, "_made", waited)
    _step(model)
    after = model.strategy.state(model).tensors
    for chunk in staging.chunks:
        assert torch.equal(chunk.tensor, before[chunk.name])
    assert not torch.equal(after["module.0.weight"], before["module.0.weight"])
    assert staging._checked.is_set() and not staging._changed
    staging.release()
    assert not model.optimizers[0]._optimizer_step_pre_hooks


@pytest.mark.parametrize("how", ["in place", "behind torch's back", "through numpy"])
def test_a_change_by_hand_before_the_copy_is_an_error(ctx, how):
    model = _model(ctx)
    staging = _stage(ctx, model)
    weight = model.module[0].weight
    if how == "in place":
        with torch.no_grad():
            weight.mul_(1.0)
    elif how == "through numpy":
        weight.detach().numpy()[...] = 7
    else:
        weight.data.mul_(2)
    with (
        pytest.raises(fx.CheckpointError, match=r"^module\.0\.weight changed .* saving\.copied\("),
        staging.making(),
    ):
        pass


def test_a_change_by_hand_is_told_or_waits(ctx, tmp_path):
    model = _model(ctx)
    wanted = model.module[0].weight.detach().clone()
    with _held() as go:
        saving = fx.save(tmp_path, ctx, model, background=True)
        with torch.no_grad():
            model.module[0].weight.zero_()
        go.set()
        with pytest.raises(fx.CheckpointError, match=r"model/module\.0\.weight changed"):
            saving.result()
    with pytest.raises(fx.CheckpointError, match="changed"):
        fx.save(tmp_path, ctx, model)
    assert fx.latest(tmp_path) is None
    with torch.no_grad():
        model.module[0].weight.copy_(wanted)
    with _held() as go:
        saving = fx.save(tmp_path, ctx, model, background=True)
        saving.copied()
        with torch.no_grad():
            model.module[0].weight.zero_()
        go.set()
        saving.result()
    with _held() as go:  # what restore changes waits too
        again = fx.save(tmp_path, ctx, model, background=True)
        fx.restore(saving.path, ctx, model)
        go.set()
        again.result()
    assert torch.equal(model.module[0].weight, wanted)
    assert len(model.optimizers[0]._optimizer_step_pre_hooks) == 1
    fx.restore(again.path, ctx, model)
    assert not model.module[0].weight.any()


def test_accelerators_copy_on_a_stream_of_their_own(ctx, monkeypatch):
    told = []

    class Stream:
        def __init__(self, device):
            told.append(f"new {device}")

        def wait_stream(self, other):
            told.append(f"wait for {other.name}")

        def record_event(self):
            told.append("record")
            return SimpleNamespace(
                device=torch.device("cpu"), synchronize=lambda: told.append("synchronize")
            )

        def __enter__(self):
            told.append("enter")

        def __exit__(self, *_):
            told.append("leave")

    current = SimpleNamespace(name="the loop's", wait_event=lambda _: told.append("loop waits"))
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current)
    monkeypatch.setattr(host_copies._DeferredCopy, "on_host", False)
    model = _model(ctx)
    staging = _stage(ctx, model)
    assert told == ["new cpu", "wait for the loop's", "enter", "leave", "record"]
    staging.hold(model.optimizers)
    _step(model)
    _step(model)  # which waits for nothing any more
    assert told[5:] == ["loop waits"]
    with staging.making():
        pass
    assert told[6:] == ["synchronize"]


def _slow(ctx, folder):
    """Rank 1 does not get to its file in time; then all is well again."""
    short = fx.detect(device="cpu", timeout_s=1)
    model = fx.wrap(nn.Linear(2, 2), short)
    with _held() as go:
        if ctx.rank == 0:
            go.set()
        saving = fx.save(folder, short, model, position=fx.Position(updates=1), background=True)
        if ctx.rank == 0:
            with pytest.raises(fx.CheckpointError, match="never joined"):
                saving.result()
        fx.ops.barrier(ctx)
        go.set()
        with pytest.raises(fx.CheckpointError):
            saving.result()
    with pytest.raises(fx.CheckpointError):  # nobody had asked through save
        fx.save(folder, short, model, background=True)
    fx.ops.barrier(ctx)
    position = fx.Position(updates=2)
    return fx.save(folder, short, model, position=position, background=True).result()


def test_after_a_save_that_timed_out_others_work(pair, tmp_path):
    wanted = str(tmp_path / "update-0000000002")
    assert pair.run(_slow, str(tmp_path)) == [wanted, wanted]
    assert fx.verify(tmp_path).path == wanted


def _background(ctx, folder):
    model, fns = _runs.start(ctx, "plain", fx.Plan(seed=4))
    loader = _runs.loader_of(ctx, model.plan)
    report, _ = _runs.go_on(ctx, loader, fns, 2)
    wanted = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    first = fx.save(folder, ctx, model, position=report.position, background=True)
    position = report.position
    skipped = fx.save(folder, ctx, model, position=position, background=True, busy="skip")
    report, _ = _runs.go_on(ctx, loader.at(report.position), fns, 2)  # while it is written
    second = fx.save(folder, ctx, model, position=report.position, background=True)
    assert first.done()  # the second waited for it
    buffer = ctx.comm.state.save_buffer.data_ptr()
    second.result()
    third = fx.save(folder, ctx, model, position=fx.Position(updates=8), background=True)
    assert ctx.comm.state.save_buffer.data_ptr() == buffer
    third.result(20)
    other = _runs.start(ctx, "plain", model.plan)[0]
    fx.restore(first.path, ctx, other)
    same = all(torch.equal(t, wanted[name]) for name, t in other.module.state_dict().items())
    return same, skipped is first or skipped.path != first.path, sorted(os.listdir(folder))


def test_saving_in_the_background(cluster, tmp_path):
    for same, skipped, names in cluster.run(_background, str(tmp_path)):
        assert same and skipped
        assert "update-0000000002" in names and names[-1] == "update-0000000008"


def _background_fails(ctx, folder, how):
    model = fx.wrap(nn.Linear(2, 2), ctx)
    fx.save(folder, ctx, model, position=fx.Position(updates=1))
    file = os.path.join(folder, "update-0000000002")
    saving = fx.save(folder, ctx, model, position=fx.Position(updates=3), background=True)
    saving.result()
    fx.ops.barrier(ctx)
    if ctx.is_main:
        os.mkdir(file)  # appears while the save is under way: the rename must fail
    kept = implementation.new_name
    implementation.new_name = lambda folder, updates: "update-0000000002"
    try:
        saving = fx.save(folder, ctx, model, position=fx.Position(updates=2), background=True)
    finally:
        implementation.new_name = kept
    try:
        if how == "result":
            saving.result()
        elif how == "next":
            fx.save(folder, ctx, model, position=fx.Position(updates=4))
        else:
            ctx.comm.finish(None)
    except fx.CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("how", ["result", "next", "close"])
def test_an_error_in_the_background_is_raised_once_and_never_lost(clusters, how, tmp_path):
    told = clusters[2].run(_background_fails, str(tmp_path), how)
    assert all(text and "FileExistsError" in text for text in told)
    assert fx.latest(tmp_path) == str(tmp_path / "update-0000000003")
    clusters[2].close()  # "close" has ended its groups
