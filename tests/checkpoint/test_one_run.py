"""Saves of two runs into one folder: one at a time."""

import os

import pytest
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint import saving
from fxtrain.checkpoint.folder_lock import acquire
from fxtrain.checkpoint.storage import open_storage


def _save_one(ctx, folder):
    try:
        return fx.save(folder, ctx, fx.wrap(nn.Linear(2, 2), ctx)).path
    except fx.CheckpointError as error:
        return str(error)


def test_all_ranks_hear_that_another_process_saves(pair, tmp_path):
    lock = acquire(open_storage(tmp_path))
    said = pair.run(_save_one, str(tmp_path))
    assert said[0] == said[1] and f"in use by process {os.getpid()} on" in said[0]
    lock.release()
    assert pair.run(_save_one, str(tmp_path)) == [str(tmp_path / "update-0000000000")] * 2
    assert os.listdir(tmp_path) == ["update-0000000000"]


@pytest.fixture
def ctx():
    with fx.detect(env={}, device="cpu") as found:
        yield found


@pytest.mark.parametrize("background", [False, True])
def test_a_save_under_way_keeps_others_out(ctx, background, tmp_path, monkeypatch):
    write, told = saving.write_file, []

    def write_and_let_others_try(*args):
        with fx.detect(env={}, device="cpu") as other, pytest.raises(fx.CheckpointError) as caught:
            fx.save(tmp_path, other, fx.wrap(nn.Linear(2, 2), other))
        told.append(str(caught.value))
        return write(*args)

    monkeypatch.setattr(saving, "write_file", write_and_let_others_try)
    fx.save(tmp_path, ctx, fx.wrap(nn.Linear(2, 2), ctx), background=background).result()
    assert len(told) == 1 and "One run at a time" in told[0]
    assert os.listdir(tmp_path) == ["update-0000000000"]


def test_nothing_is_committed_without_the_lock(ctx, tmp_path, monkeypatch):
    write = saving.write_file

    def write_and_lose_the_lock(*args):
        open_storage(tmp_path).unlink(".lock-save")
        return write(*args)

    monkeypatch.setattr(saving, "write_file", write_and_lose_the_lock)
    with pytest.raises(fx.CheckpointError, match="took over the lock"):
        fx.save(tmp_path, ctx, fx.wrap(nn.Linear(2, 2), ctx))
    assert fx.latest(tmp_path) is None
    # Whoever took the lock may have a draft there: nothing is removed without it.
    assert [name.partition("-")[0] for name in os.listdir(tmp_path)] == [".partial"]
    monkeypatch.undo()
    fx.save(tmp_path, ctx, fx.wrap(nn.Linear(2, 2), ctx))
    assert os.listdir(tmp_path) == ["update-0000000000"]


@pytest.mark.parametrize(
    "where", ["write_file", "list_checkpoints", "new_name", "chunks_to_write", "stage"]
)
def test_a_save_that_fails_lets_others_save(ctx, where, tmp_path, monkeypatch):
    def fail(*args, **more):
        raise KeyboardInterrupt if where == "chunks_to_write" else OSError("no")

    model = fx.wrap(nn.Linear(2, 2), ctx)
    with monkeypatch.context() as patch:
        patch.setattr(saving, where, fail)
        with pytest.raises((fx.CheckpointError, KeyboardInterrupt)):
            fx.save(tmp_path, ctx, model, background=where == "stage").result()
    ctx.comm.state.background_tasks.clear()  # its error was seen
    fx.save(tmp_path, ctx, model)
    assert os.listdir(tmp_path) == ["update-0000000000"]
