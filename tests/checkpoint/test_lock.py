"""One saver at a time in a folder, on disk and on what fsspec reaches; the dead block nobody."""

import json
import os
import secrets
import subprocess
import threading
import time

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fxtrain as fx
from fxtrain.checkpoint import folder_lock
from fxtrain.checkpoint.folder_lock import acquire, read_lock
from fxtrain.checkpoint.local_storage import open_storage
from fxtrain.checkpoint.owner import is_running, owner_from, this_process
from tests.checkpoint._owners import elsewhere, ended


def _new_folder(kind, tmp_path):
    folder = open_storage(
        tmp_path / secrets.token_hex(4) if kind == "disk" else f"memory://{secrets.token_hex(8)}"
    )
    folder.make()
    return folder


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    return _new_folder(request.param, tmp_path)


def _lock_of(folder, owner, name="000000001"):
    """Leave a lock as another process would."""
    data = {"token": "theirs", "owner": attrs.asdict(owner), "beat": "0" * 12}
    folder.lock(name, json.dumps(data).encode())


def test_this_process_runs_and_is_itself():
    assert is_running(this_process()) is True
    assert this_process() == this_process()
    assert owner_from(attrs.asdict(this_process())) == this_process()


def test_an_ended_process_does_not_run():
    assert is_running(ended()) is False


def test_a_number_that_was_given_again_is_another_process():
    assert is_running(attrs.evolve(this_process(), started="1")) is False


def test_a_process_that_ended_and_was_not_waited_for_does_not_run():
    process = subprocess.Popen(["sleep", "60"])
    try:
        with open(f"/proc/{process.pid}/stat") as file:
            started = file.read().rpartition(")")[2].split()[19]
        owner = attrs.evolve(this_process(), pid=process.pid, started=started)
        assert is_running(owner) is True
        process.kill()
        deadline = time.monotonic() + 20
        while is_running(owner) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_running(owner) is False  # though it still has its number
    finally:
        process.kill()
        process.wait()


def test_what_runs_elsewhere_is_not_known():
    assert is_running(elsewhere()) is None


@pytest.mark.parametrize("pid", [0, -1, 1 << 40])
def test_a_number_that_is_none_does_not_run(pid):
    assert is_running(attrs.evolve(this_process(), pid=pid)) is False


@pytest.mark.parametrize(
    "data", [None, {}, [], {"host": "a"}, {**attrs.asdict(this_process()), "pid": "1"}]
)
def test_what_is_no_owner_is_refused(data):
    with pytest.raises(ValueError, match="does not describe a process"):
        owner_from(data)


def test_the_second_is_refused_and_told_who_saves(folder):
    lock = acquire(folder)
    with pytest.raises(fx.CheckpointError, match=rf"written by process {os.getpid()} on .* this"):
        acquire(folder)
    lock.release()
    acquire(folder).release()
    assert folder.locks() == []


def test_a_released_lock_leaves_nothing(tmp_path):
    acquire(open_storage(tmp_path)).release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("who", ["ended", "started before"])
def test_the_lock_of_a_dead_process_is_taken_over(folder, who):
    dead = ended() if who == "ended" else attrs.evolve(this_process(), started="1")
    _lock_of(folder, dead)
    lock = acquire(folder)
    assert folder.locks() == [lock.name] != ["000000001"]
    lock.check()
    lock.release()
    assert folder.locks() == []


@pytest.mark.parametrize("data", [None, b"", b"{", b'{"token":1}', b"[]", b"\xff"])
def test_a_silent_lock_of_another_machine_is_taken_over(folder, data, monkeypatch):
    monkeypatch.setattr(folder_lock, "STALE_S", 0.3)
    if data is None:
        _lock_of(folder, elsewhere())
    else:
        folder.lock("000000001", data)
    began = time.monotonic()
    acquire(folder).release()
    assert time.monotonic() - began >= 0.3


def test_a_lock_of_another_machine_that_shows_life_is_respected(folder, monkeypatch):
    monkeypatch.setattr(folder_lock, "_HEARTBEAT_INTERVAL_S", 0.05)
    monkeypatch.setattr(folder_lock, "this_process", elsewhere)
    lock = acquire(folder)  # as the other machine, which shows that it lives
    monkeypatch.setattr(folder_lock, "this_process", this_process)
    began = time.monotonic()
    with pytest.raises(fx.CheckpointError, match=r"written by process \d+ on node7\."):
        acquire(folder)
    assert time.monotonic() - began < folder_lock.STALE_S / 2
    lock.release()
    acquire(folder).release()


@pytest.mark.parametrize("name", ["000000001", "000000009"])
def test_who_sees_a_live_lock_after_its_own_withdraws(folder, name, monkeypatch):
    """Two processes may find the same dead lock, and one of them be late."""
    kind = type(folder)
    create = kind.lock
    _lock_of(folder, ended(), "000000001")

    def create_and_see_another(self, own, data):
        create(self, own, data)
        monkeypatch.setattr(kind, "lock", create)
        self.unlock("000000001")
        _lock_of(self, this_process(), name)

    monkeypatch.setattr(kind, "lock", create_and_see_another)
    with pytest.raises(fx.CheckpointError, match="is being written"):
        acquire(folder)
    assert folder.locks() == [name]


def test_a_lock_that_is_lost_is_found_out(folder):
    lock = acquire(folder)
    folder.unlock(lock.name)
    _lock_of(folder, this_process(), lock.name)  # of the same name, and another's
    with pytest.raises(fx.CheckpointError, match="took over the lock"):
        lock.check()
    lock.release()
    assert folder.locks() == [lock.name]  # not ours to remove


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


@settings(max_examples=25, deadline=None)
@given(threads=st.integers(2, 8), dead=st.integers(0, 3))
def test_never_two_at_a_time(tmp_path_factory, threads, dead):
    folder = _new_folder("disk", tmp_path_factory.mktemp("locks"))
    gone = attrs.evolve(this_process(), started="1")
    for number in range(dead):
        _lock_of(folder, gone, f"{number + 1:09d}")
    most, got = _compete(folder, threads)
    assert most <= 1
    for lock in got:
        assert lock.ended.is_set()
    acquire(folder).release()  # nothing is left that blocks
    assert folder.locks() == []


def test_a_lock_with_a_key_twice_says_nothing(tmp_path):
    lock = acquire(open_storage(str(tmp_path)))
    try:
        raw = lock.bytes(0)
    finally:
        lock.release()
    assert read_lock(raw)[0] == lock.token
    assert read_lock(raw.replace(b'{"token"', b'{"token": "other", "token"', 1)) == (None, None)
    assert read_lock(raw.replace(b'"000000000000"', b"NaN")) == (None, None)
