"""One run at a time writes into a folder, and what killed processes leave there goes."""

import json
import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.checkpoint import folder_lock
from fxtrain.checkpoint.folder_lock import this_process
from fxtrain.trackers import read_run
from tests._errors import raises_code
from tests.launched._run import PYTHON, finish, run_fork, start_fork


def _files(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "lock-" not in str(path)
    }


def _reports(ctx, folder, **how):
    torch.manual_seed(0)
    model = fx.wrap(torch.nn.Linear(1, 1), ctx, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch.data).square().mean())
    loader = fx.shard(DataLoader(torch.ones(16, 1), batch_size=2), ctx)
    return fx.fit(ctx, fns, loader, folder, **{"updates": 8, "log_every": 1, "show": False, **how})


def _track(ctx, folder):
    return fx.track(folder, ctx, resume="folder", position=fx.Position())


SECOND = {"fit": lambda ctx, folder: next(_reports(ctx, folder)), "track": _track}


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("first", ["fit", "track"])
def test_a_second_run_in_a_folder_is_refused_and_changes_nothing(ctx, tmp_path, first, second):
    if first == "fit":
        held = _reports(ctx, tmp_path)
        next(held)
    else:
        held = _track(ctx, tmp_path)
        held.log({"loss": 1.0}, fx.Position(updates=1))
        held.flush()
    before = _files(tmp_path)
    with raises_code("FX605"):
        SECOND[second](ctx, tmp_path)
    assert _files(tmp_path).keys() == before.keys()
    held.close()
    assert not list(tmp_path.glob(".lock-*"))
    assert [step for step, _ in read_run(tmp_path).curve("loss")] == [1]
    SECOND[second](ctx, tmp_path)


def _twice(ctx, folder):
    first = _reports(ctx, folder)
    next(first)
    try:
        next(_reports(ctx, folder))
    except fx.PlanError as error:
        return type(error).__name__, str(error)
    finally:
        first.close()


def test_it_is_one_error_on_all_ranks(pair, tmp_path):
    errors = pair.run(_twice, str(tmp_path))
    assert errors[0] == errors[1] and "in use by process" in errors[0][1]
    assert len(read_run(tmp_path).curve("loss")) == 1


def _has_written(folder, updates):
    """Whether the threads of a run have written the entries and the checkpoint before an update."""
    saved = (folder / f"update-{updates - 1:010d}").exists()
    return saved and len(read_run(folder).curve("loss")) == updates


SCRIPT = """
import sys, time
from pathlib import Path
import fxtrain as fx
from tests.trackers.test_one_owner import _reports

with fx.detect(env={}, device="cpu") as ctx:
    for report in _reports(ctx, sys.argv[1], save_every=1):
        if report.position.updates == 3 and sys.argv[2] == "waits":
            Path(sys.argv[1]).with_name("waits").touch()
            time.sleep(600)
"""


def test_a_second_process_changes_nothing_and_a_killed_one_blocks_nobody(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    folder = tmp_path / "run"
    command = (*PYTHON, str(tmp_path / "script.py"), str(folder))
    first = start_fork(*command, "waits")
    while not (tmp_path / "waits").exists() or not _has_written(folder, 3):
        assert first.poll() is None
        time.sleep(0.05)
    before = _files(folder)
    refused = run_fork(*command, "ends")
    assert refused.code == 1 and "One run at a time can write into a folder" in refused.err
    assert _files(folder) == before
    os.kill(first.pid, signal.SIGKILL)
    finish(first)
    assert run_fork(*command, "ends").code == 0
    assert [step for step, _ in read_run(folder).curve("loss")] == [*range(1, 9)]
    assert not list(folder.glob(".lock-*"))


def _foreign_lock(folder, **change):
    """The lock of a run, as a process on another machine writes it."""
    owner = {"host": "elsewhere", "machine": "another", "pid": 1, **change}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"token": "ab", "owner": owner, "beat": "000000000000"})
    (folder / ".lock-run").write_text(text)


@pytest.fixture
def clock(clock_of):
    """The clock of who waits for a sign of life."""
    return clock_of(folder_lock)


def test_the_lock_of_a_dead_machine_is_replaced(ctx, tmp_path, clock):
    _foreign_lock(tmp_path)
    with _track(ctx, tmp_path):
        assert json.loads((tmp_path / ".lock-run").read_text())["token"] != "ab"


def test_the_lock_of_an_earlier_process_with_the_same_number_is_replaced(ctx, tmp_path, clock):
    _foreign_lock(tmp_path, **{**this_process(), "started": "0"})
    _track(ctx, tmp_path).close()
    assert not list(tmp_path.glob(".lock-*"))


def test_drafts_that_killed_processes_left_are_replaced(ctx, tmp_path):
    with _track(ctx, tmp_path) as run:
        run.log({"loss": 1.0}, 1)
    for name in (".metrics.jsonl-draft", ".run.json-draft"):
        (tmp_path / name).write_text("{")
    _track(ctx, tmp_path).close()  # goes back to the start, so that the file is written again
    assert not list(tmp_path.glob(".*")) and read_run(tmp_path).entries == ()
