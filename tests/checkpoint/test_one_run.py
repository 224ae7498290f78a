"""Saves of two runs into one folder: one at a time, and neither prunes the other's."""

import os

import pytest
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint import saving
from fxtrain.checkpoint.folder_lock import acquire, process_of, this_process
from fxtrain.checkpoint.folders import CheckpointInfo, to_prune
from fxtrain.checkpoint.storage import open_storage
from tests.checkpoint._owners import elsewhere, ended


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
    assert os.listdir(tmp_path) == []
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


def _save_many(ctx, folder, updates, keep):
    model = fx.wrap(nn.Linear(2, 2), ctx)
    for update in updates:
        fx.save(folder, ctx, model, position=fx.Position(updates=update), keep_last=keep)


def test_what_a_run_that_still_runs_saved_is_not_pruned(ctx, clusters, tmp_path):
    """The pool's process and this one take turns, as a requeued job and its predecessor do."""
    folder, mine, theirs = str(tmp_path), [], []
    for turn in range(3):
        updates = [10 * turn + 1, 10 * turn + 2]
        clusters[1].run(_save_many, folder, updates, 1)
        _save_many(ctx, folder, [updates[1], updates[1] + 1], 1)
        theirs, mine = [f"update-{updates[1]:010d}"], [f"update-{updates[1] + 1:010d}"]
        assert sorted(os.listdir(folder)) == [*theirs, *mine]
        fx.checkpoint.verify(folder)
    assert fx.latest(folder).endswith(mine[0])


def _number(who):
    return process_of(who())


@pytest.mark.parametrize("who", [elsewhere, ended, this_process])
def test_a_damaged_manifest_stays_while_another_run_may_have_written_it(who):
    found = [
        CheckpointInfo(name="update-0000000001", order=1, saver=_number(who)),
        CheckpointInfo(name="update-0000000002", order=None, problems=("changed",)),
        CheckpointInfo(name="update-0000000003", order=2),
    ]
    gone = to_prune(found, _number(this_process), keep_last=1)
    assert gone == ([] if who is elsewhere else ["update-0000000001", "update-0000000002"])


def test_a_run_that_ended_is_pruned_as_ones_own(ctx, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "this_process", ended)
    _save_many(ctx, tmp_path, [1, 2, 3], 3)
    monkeypatch.undo()
    _save_many(ctx, tmp_path, [4], 2)
    assert sorted(os.listdir(tmp_path)) == ["update-0000000003", "update-0000000004"]


def test_a_run_on_another_machine_counts_as_ended_after_three_commits(ctx, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "this_process", elsewhere)
    _save_many(ctx, tmp_path, [1, 2], 2)
    monkeypatch.undo()
    _save_many(ctx, tmp_path, [3, 4], 1)
    names = sorted(os.listdir(tmp_path))
    assert names == [f"update-{update:010d}" for update in (1, 2, 4)]
    _save_many(ctx, tmp_path, [5], 1)
    assert os.listdir(tmp_path) == ["update-0000000005"]
