"""Saves in the background: what they contain, who waits for them, and who hears of failure."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint import saving as implementation
from fxtrain.checkpoint.background import CheckpointState, stage
from fxtrain.checkpoint.write_plan import writable_chunks
from tests._errors import raises_code
from tests._slow import slow_after
from tests.checkpoint import _runs
from tests.cluster._timeouts import with_timeout


def _model(ctx, net=None):
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)) if net is None else net
    model = fx.wrap(net, ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.optimizers[0].step()
    return model


@contextmanager
def _held():
    """Saves do not get to their files until the block sets the event."""
    go, write = threading.Event(), implementation.write_chunks

    def wait_and_write(*args):
        go.wait()
        return write(*args)

    implementation.write_chunks = wait_and_write
    try:
        yield go
    finally:
        go.set()
        implementation.write_chunks = write


def test_a_change_after_save_has_returned_is_not_saved(ctx, tmp_path):
    model = _model(ctx)
    before = {name: t.clone() for name, t in model.strategy.state(model).tensors.items()}
    with _held() as go:
        saving = fx.save(tmp_path, ctx, model, position=fx.Position(), background=True)
        with torch.no_grad():
            for tensor in model.strategy.state(model).tensors.values():
                tensor.zero_()
        go.set()
        fx.restore(saving.result(), ctx, model)
    after = model.strategy.state(model).tensors
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def _slow(ctx, folder):
    """Rank 1 does not get to its file in time; then all is well again."""
    model = fx.wrap(nn.Linear(2, 2), ctx)
    fx.save(folder, ctx, model, position=fx.Position(), background=True).result()
    state = ctx.comm.slot(CheckpointState)  # the first save has opened its group
    state.background = with_timeout(state.background)
    with _held() as go:
        if ctx.rank == 0:
            go.set()
        saving = fx.save(folder, ctx, model, position=fx.Position(updates=1), background=True)
        if ctx.rank == 0:
            with raises_code("FX302", "never joined"):
                saving.result()
        fx.ops.barrier(ctx)
        go.set()
        with pytest.raises(fx.CheckpointError):
            saving.result()
    fx.ops.barrier(ctx)
    position = fx.Position(updates=2)
    return fx.save(folder, ctx, model, position=position, background=True).result()


@pytest.mark.slow
def test_after_a_save_that_timed_out_others_work(pair, tmp_path):
    wanted = str(tmp_path / "update-0000000002")
    assert pair.run(_slow, str(tmp_path)) == [wanted, wanted]
    assert fx.checkpoint.verify(tmp_path).path == wanted


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
    buffer = ctx.comm.slot(CheckpointState).buffer.data_ptr()
    second.result()
    third = fx.save(folder, ctx, model, position=fx.Position(updates=8), background=True)
    assert ctx.comm.slot(CheckpointState).buffer.data_ptr() == buffer
    third.result(100)
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
        elif how == "next" or (how == "next, seen by one rank" and _seen(saving, ctx.rank)):
            fx.save(folder, ctx, model, position=fx.Position(updates=4))
        else:
            ctx.comm.finish(None)
    except fx.CheckpointError as error:
        return str(error)
    return None


def _seen(saving, rank):
    if rank == 1:
        with pytest.raises(fx.CheckpointError):
            saving.result()
    return True


@pytest.mark.parametrize(
    "how", slow_after(3, ["result", "next", "next, seen by one rank", "close"])
)
def test_an_error_in_the_background_is_raised_once_and_never_lost(clusters, how, tmp_path):
    told = clusters[2].run(_background_fails, str(tmp_path), how)
    assert all(text and "FileExistsError" in text for text in told)
    assert fx.latest(tmp_path) == str(tmp_path / "update-0000000003")
    clusters[2].close()  # "close" has ended its groups


def test_large_tensors_are_staged_at_cache_lines():
    """Counters, which AdamW has one of for each parameter, are not between them."""
    with fx.detect(env={}, device="cpu") as ctx:
        tensors = {f"{i}.{name}": t for i in range(3) for name, t in _STATE.items()}
        staged = stage(ctx, [*writable_chunks(tensors).values()])
    starts = {chunk.tensor.data_ptr() % 64 for chunk in staged if chunk.tensor.nbytes >= 64}
    assert starts == {staged[0].tensor.data_ptr() % 64}


_STATE = {
    "step": torch.zeros(()),
    "weight": torch.ones(64, 3),
    "half": torch.ones(32).bfloat16(),
    "mask": torch.ones(3, dtype=torch.bool),
    "none": torch.ones(0, 4),
}


# Imports torch once, and tries each way to end in a fork.
PROGRAM = """
import atexit, os, resource, sys, threading, time
import torch
import fxtrain as fx
from fxtrain.checkpoint import saving

folder, ways = sys.argv[1], sys.argv[2:]
for way in ways:
    pid = os.fork()
    if not pid:
        break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    sys.stdout.write(f"code {way} {code}\\n")
    sys.stdout.flush()
else:
    os._exit(0)

sys.stderr = sys.stdout
atexit.register(lambda: print("registered before"))
ctx = fx.detect(env={}, device="cpu")
model = fx.wrap(torch.nn.Linear(600, 600), ctx)
fails, _, how = way.partition(":")
if fails == "fails":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
write = saving.write_chunks
go = threading.Event()
def slow(*args):
    # Not before the script has ended, and some time after.
    threading.main_thread().join() if how != "asks" else None
    time.sleep(0.1)
    return write(*args)
saving.write_chunks = slow
saving = fx.save(f"{folder}/{way}", ctx, model, background=True)
if how == "exits":
    sys.exit(0)
if how == "exits with 3":
    sys.exit(3)
if how == "raises":
    raise ValueError("its own")
if how == "asks":
    try:
        saving.result()
    except fx.CheckpointError:
        print("handled")
"""

WAYS = {  # the code, how often the error is shown
    "fails:ends": (1, 1),
    "fails:exits": (1, 1),
    "fails:exits with 3": (1, 1),
    "fails:raises": (1, 1),
    "fails:asks": (0, 0),
    "works:ends": (0, 0),
    "works:exits with 3": (3, 0),
}


@pytest.mark.slow
def test_the_end_waits_for_a_save_and_tells_of_its_failure(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *WAYS],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    said = dict(zip(WAYS, ended.stdout.split("code ")[:-1], strict=True))
    # What comes before "code" of the next is of the one before.
    codes = [line for line in ended.stdout.splitlines() if line.startswith("code ")]
    for way, code in zip(WAYS, codes, strict=True):
        wanted, shown = WAYS[way]
        assert code == f"code {way} {wanted}", ended.stdout
        assert said[way].count("was not saved") == shown, said[way]
        assert said[way].count("registered before") == 1
        assert ("its own" in said[way]) == way.endswith("raises")
        whole = fx.latest(tmp_path / way)
        assert (whole is not None) == way.startswith("works")
        if whole is not None:
            fx.checkpoint.verify(whole)
    assert "Call result()" in said["fails:ends"]
