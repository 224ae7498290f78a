"""Nothing that a launch has started outlives it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fxtrain as fx
from fxtrain.launchers import orphans
from tests._errors import raises_code
from tests._patience import patience, wait_for
from tests.launched._run import FXTRAIN, PYTHON, SCRIPTS, finish, run, start
from tests.launched.scripts.ranks import is_running, stubborn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what a rank started"),
]
RANKS = str(SCRIPTS / "ranks.py")


def _pids(folder):
    return [int(entry.name) for entry in folder.iterdir()]


def test_children_and_daemons_of_a_failed_rank_end_before_the_next_attempt(tmp_path):
    words = ("--ranks=1", "--restarts=1", "--shutdown=1", RANKS, "stubborn", str(tmp_path))
    ended = run(*FXTRAIN, "launch", "--cpu", *words, "fail")
    assert ended.code == 3, ended.err
    assert ended.out == ""  # the second attempt met none of the first
    assert len(_pids(tmp_path)) == 6
    assert [pid for pid in _pids(tmp_path) if is_running(pid)] == []


def test_ranks_that_ignore_signals_end_after_their_launcher_was_killed(tmp_path):
    words = ("--ranks=1", "--shutdown=1", RANKS, "stubborn", str(tmp_path))
    process = start(*FXTRAIN, "launch", "--cpu", *words)
    wait_for(lambda: len(_pids(tmp_path)) == 3)
    process.kill()
    assert finish(process, timeout_s=30).code == -signal.SIGKILL
    wait_for(lambda: not any(map(is_running, _pids(tmp_path))))


def test_children_and_daemons_of_a_function_end_with_it(tmp_path):
    with raises_code("FX700", "code 3"):
        fx.launch(stubborn, (str(tmp_path), "fail"), ranks=1, timeout_s=60 * patience())
    assert len(_pids(tmp_path)) == 3
    assert [pid for pid in _pids(tmp_path) if is_running(pid)] == []


CALLER = """
import sys
import fxtrain as fx
from tests.launched.scripts.ranks import stubborn
if __name__ == "__main__":
    fx.launch(stubborn, (sys.argv[1],), ranks=1)
"""


def test_functions_that_ignore_signals_end_after_their_caller_was_killed(tmp_path):
    folder = tmp_path / "pids"
    folder.mkdir()
    (tmp_path / "caller.py").write_text(CALLER)
    process = start(*PYTHON, str(tmp_path / "caller.py"), str(folder))
    wait_for(lambda: len(_pids(folder)) == 3)
    process.kill()
    assert finish(process, timeout_s=30).code == -signal.SIGKILL
    wait_for(lambda: not any(map(is_running, _pids(folder))))


def _sleeper(mark, seconds=600):
    env = {**os.environ, orphans.MARK: mark}
    words = (sys.executable, "-c", f"import time; print(1, flush=True); time.sleep({seconds})")
    process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_only_what_has_the_mark_is_ended():
    outer = orphans.mark_within({})
    inner = orphans.mark_within({orphans.MARK: outer})
    others = [_sleeper(orphans.mark_within({})), _sleeper(outer)]
    mine = [_sleeper(inner), _sleeper(orphans.mark_within({orphans.MARK: inner}))]
    orphans.end_strays(inner, patience_s=600, ask=True)
    assert [process.wait() for process in mine] == [-signal.SIGTERM] * 2
    assert [process.poll() for process in others] == [None] * 2
    for process in others:
        process.kill()
    for process in (*mine, *others):
        with process:
            process.wait()


@pytest.mark.parametrize(("seconds", "patience_s", "code"), [(0.3, 600.0, 0), (600, 0.3, -9)])
def test_after_a_good_end_what_is_left_has_time(seconds, patience_s, code):
    mark = orphans.mark_within({})
    with _sleeper(mark, seconds) as process:
        orphans.end_strays(mark, patience_s=patience_s, ask=False)
        assert process.wait() == code


def _children():
    found = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in found for pid in path.read_text().split()}


def test_a_signal_for_the_ranks_does_not_end_the_keeper():
    before = _children()
    with orphans.kept(orphans.mark_within({}), patience_s=1.0):
        (keeper,) = _children() - before
        os.kill(keeper, signal.SIGUSR1)
        status = Path(f"/proc/{keeper}/status").read_text()
        waiting = int(re.search(r"ShdPnd:\s+(\w+)", status)[1], 16)
        assert waiting >> signal.SIGUSR1 - 1 & 1 and is_running(keeper)  # it is never delivered
    assert not is_running(keeper)
