"""One saver at a time in a folder, and two runs that do not prune each other's checkpoints."""

import json
import os
import secrets
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fxtrain as fx
from fxtrain.checkpoint import folder_lock, saving
from fxtrain.checkpoint.folder_lock import acquire, process_of, this_process
from fxtrain.checkpoint.folders import CheckpointInfo, to_prune
from fxtrain.checkpoint.storage import UnreadableError, open_storage
from tests._errors import raises_code
from tests.checkpoint._owners import elsewhere, ended


def _new_folder(kind, tmp_path):
    folder = open_storage(
        tmp_path / secrets.token_hex(4) if kind == "disk" else f"memory://{secrets.token_hex(8)}"
    )
    folder.make()
    return folder


@pytest.fixture
def clock(clock_of):
    """The clock of who waits for a sign of life."""
    return clock_of(folder_lock)


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    return _new_folder(request.param, tmp_path)


NAME = ".lock-save"


def _lock_of(folder, owner):
    """Leave a lock as another process would."""
    data = {"token": "theirs", "owner": owner, "beat": "0" * 12}
    folder.put(NAME, json.dumps(data).encode(), new=True)


def test_the_second_is_refused_and_told_who_saves(folder):
    lock = acquire(folder)
    with raises_code("FX605", f"process {os.getpid()} on"):
        acquire(folder)
    lock.release()
    acquire(folder).release()
    assert folder.files() == {}


def test_a_released_lock_leaves_nothing(tmp_path):
    acquire(open_storage(tmp_path)).release()
    assert os.listdir(tmp_path) == []


def test_the_lock_of_a_dead_process_is_taken_over(folder):
    _lock_of(folder, ended())
    lock = acquire(folder)
    lock.check()
    lock.release()
    assert folder.files() == {}


@pytest.mark.parametrize("change", [{"pid": 1}, {"pid": 1 << 40}, {"started": "0"}], ids=repr)
def test_a_number_that_another_process_has_now_blocks_nobody(folder, change, clock):
    _lock_of(folder, {**this_process(), **change})
    acquire(folder).release()
    assert not clock.slept


def test_a_process_of_this_machine_that_runs_is_respected_without_waiting(folder, clock):
    _lock_of(folder, this_process())  # which sends no heartbeats
    with raises_code("FX605", f"process {os.getpid()} on"):
        acquire(folder)
    assert not clock.slept


def test_who_cannot_read_its_lock_leaves_none(folder, monkeypatch):
    def fail(*_):
        raise UnreadableError("no permission")

    reads = iter([lambda *_: None, fail])
    monkeypatch.setattr(folder_lock, "_read", lambda *args: next(reads)(*args))
    with pytest.raises(UnreadableError):
        acquire(folder)
    assert folder.files() == {}


@pytest.mark.parametrize("data", [None, b"", b"{", b'{"token":1}', b"[]", b"\xff"])
def test_a_silent_lock_of_another_machine_is_taken_over(folder, data, clock):
    if data is None:
        _lock_of(folder, elsewhere())
    else:
        folder.put(NAME, data, new=True)
    acquire(folder).release()
    assert sum(clock.slept) >= folder_lock.STALE_S


def test_a_lock_of_another_machine_that_shows_life_is_respected(folder, monkeypatch, clock):
    put, beats = folder_lock.Lock.put, threading.Event()

    def put_and_tell(self, beat):
        put(self, beat)
        beats.set()

    def wait_for_a_beat():
        beats.clear()
        beats.wait()

    monkeypatch.setattr(folder_lock.Lock, "put", put_and_tell)
    monkeypatch.setattr(folder_lock, "_HEARTBEAT_INTERVAL_S", 0.01)
    monkeypatch.setattr(folder_lock, "this_process", elsewhere)
    lock = acquire(folder)  # as the other machine, which shows that it lives
    clock.meanwhile = wait_for_a_beat
    with raises_code("FX605", "node7"):
        acquire(folder)
    assert sum(clock.slept) < folder_lock.STALE_S
    lock.release()
    acquire(folder).release()


def test_who_finds_that_another_machine_was_faster_withdraws(folder, monkeypatch):
    """Two machines may find the same dead lock, and one of them be late."""
    kind = type(folder)
    unlink = kind.unlink
    _lock_of(folder, ended())

    def unlink_and_see_another(self, name):
        unlink(self, name)
        monkeypatch.setattr(kind, "unlink", unlink)
        _lock_of(self, this_process())

    monkeypatch.setattr(kind, "unlink", unlink_and_see_another)
    with raises_code("FX605"):
        acquire(folder)
    assert b"theirs" in folder.read(NAME, 1000)


def test_a_lock_that_is_lost_is_found_out(folder):
    lock = acquire(folder)
    folder.unlink(NAME)
    _lock_of(folder, this_process())  # another's
    with raises_code("FX605"):
        lock.check()
    lock.release()
    assert b"theirs" in folder.read(NAME, 1000)  # not ours to remove


def _compete(folder, threads):
    """What each of some threads got, and how many ever held the lock at a time."""
    inside, most, got = 0, 0, []
    count, go = threading.Lock(), threading.Barrier(threads)

    def work():
        nonlocal inside, most
        go.wait()
        try:
            lock = acquire(folder)
        except fx.CheckpointError:
            return
        with count:
            inside += 1
            most = max(most, inside)
            got.append(lock)
        time.sleep(0.002)
        with count:
            inside -= 1
        lock.release()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return most, got


DEAD = ended()


@settings(max_examples=25, deadline=None)
@given(threads=st.integers(2, 8), dead=st.booleans())
def test_never_two_at_a_time(tmp_path_factory, threads, dead):
    folder = _new_folder("disk", tmp_path_factory.mktemp("locks"))
    if dead:
        _lock_of(folder, DEAD)
    most, got = _compete(folder, threads)
    assert most <= 1
    for lock in got:
        assert not lock.is_ours()
    acquire(folder).release()  # nothing is left that blocks
    assert folder.files() == {}


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
    write, told = saving.write_chunks, []

    def write_and_let_others_try(*args):
        with fx.detect(env={}, device="cpu") as other, pytest.raises(fx.CheckpointError) as caught:
            fx.save(tmp_path, other, fx.wrap(nn.Linear(2, 2), other))
        told.append(str(caught.value))
        return write(*args)

    monkeypatch.setattr(saving, "write_chunks", write_and_let_others_try)
    fx.save(tmp_path, ctx, fx.wrap(nn.Linear(2, 2), ctx), background=background).result()
    assert len(told) == 1 and "One run at a time" in told[0]
    assert os.listdir(tmp_path) == ["update-0000000000"]


def test_nothing_is_committed_without_the_lock(ctx, tmp_path, monkeypatch):
    write = saving.write_chunks

    def write_and_lose_the_lock(*args):
        open_storage(tmp_path).unlink(".lock-save")
        return write(*args)

    monkeypatch.setattr(saving, "write_chunks", write_and_lose_the_lock)
    with raises_code("FX605"):
        fx.save(tmp_path, ctx, fx.wrap(nn.Linear(2, 2), ctx))
    assert fx.latest(tmp_path) is None
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    fx.save(tmp_path, ctx, fx.wrap(nn.Linear(2, 2), ctx))
    assert os.listdir(tmp_path) == ["update-0000000000"]


@pytest.mark.parametrize(
    "where", ["write_chunks", "list_checkpoints", "new_name", "chunks_to_write", "stage"]
)
def test_a_save_that_fails_lets_others_save(ctx, where, tmp_path, monkeypatch):
    def fail(*args, **more):
        raise KeyboardInterrupt if where == "chunks_to_write" else OSError("no")

    model = fx.wrap(nn.Linear(2, 2), ctx)
    with monkeypatch.context() as patch:
        patch.setattr(saving, where, fail)
        with pytest.raises((fx.CheckpointError, KeyboardInterrupt)):
            fx.save(tmp_path, ctx, model, background=where == "stage").result()
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
