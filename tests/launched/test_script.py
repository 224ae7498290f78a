"""`fxtrain launch`: what a script finds, and what a user sees when it fails."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from fxtrain.launchers import child
from tests._patience import patience, wait_for
from tests._slow import slow_after
from tests.launched._run import FXTRAIN, ROOT, SCRIPTS, finish, run, run_fork, start

RANKS = str(SCRIPTS / "ranks.py")


def _launch(*args, ranks=2, **env):
    return run(*FXTRAIN, "launch", "--ranks", str(ranks), *args, **env)


def _launch_fork(*args):
    return run_fork(*FXTRAIN, "launch", "--ranks", "2", *args)


@pytest.mark.slow
def test_script_finds_its_arguments_and_place():
    ended = run(
        *FXTRAIN, "launch", "--ranks", "2", "ranks.py", "say", "--lr", "$$1", "${local_rank}",
        cwd=SCRIPTS, OMP_NUM_THREADS="3",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told["args"] == ["--lr", "$$1", "${local_rank}"]  # as given
    assert (told["file"], told["path"]) == (RANKS, str(SCRIPTS))  # as under plain python
    assert told["OMP_NUM_THREADS"] == "3"  # the user's choice
    assert (told["MASTER_ADDR"], told["WORLD_SIZE"]) == ("127.0.0.1", "2")
    assert ended.err == ""


@pytest.mark.skipif(not hasattr(socket, "SOCK_SEQPACKET"), reason="which keeps writes apart")
def test_a_line_is_written_at_once(tmp_path):
    """So that those of ranks that write at the same time stay whole."""
    script = tmp_path / "script.py"
    script.write_text("print('one', 2)\nprint('three', end='', flush=True)\nprint()\n")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        words = (sys.executable, "-u", child.__file__, "script", "--", str(script))
        assert not subprocess.run(words, stdout=theirs, check=False).returncode
        theirs.close()
        assert [*iter(lambda: ours.recv(99), b"")] == [b"one 2\n", b"three", b"\n"]


def test_module():
    ended = run_fork(
        *FXTRAIN, "launch", "-n", "1", "-m", "scripts.ranks", "say", cwd=SCRIPTS.parent
    )
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["path"] == str(SCRIPTS.parent)


@pytest.mark.slow
def test_main_module_is_the_script():
    ended = _launch(RANKS, "main_module", ranks=1)
    assert (ended.code, ended.out) == (0, "[2, 4]\n"), ended.err


@pytest.mark.slow
def test_first_failing_rank_is_shown():
    ended = _launch_fork(RANKS, "fail")
    assert ended.code == 1
    assert ended.out == ""
    head, *rest = _report(ended)
    assert head == "fxtrain launch: Rank 1 of 2 failed: ValueError: of my own"
    assert rest[:2] == ["in two lines", "Traceback (most recent call last):"]
    assert "child.py" not in ended.err and "runpy" not in ended.err
    assert 'raise ValueError("of my own' in ended.err
    assert ended.err.count("Traceback") == 1


def _report(ended):
    """The lines of the launcher, which come after those of the ranks and of torch in them."""
    lines = ended.err.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("fxtrain launch: "))
    return lines[first:]


@pytest.mark.slow
def test_what_ranks_write_comes_before_the_report():
    """Also what a rank writes that is ended since another one failed."""
    raw = "[rank0]:[E101 03:04:05.6 ProcessGroupGloo.cpp:1] closed\n"
    ended = _launch_fork(RANKS, "write_late", raw)
    assert ended.code == 1 and ended.err.count(raw) == 2
    assert _report(ended)[0] == "fxtrain launch: Rank 1 of 2 failed: ValueError: of my own"


@pytest.mark.slow
def test_a_rank_that_hangs_is_not_shown_before_the_one_that_waited_for_it():
    """The launcher kills it, which is no failure of its own."""
    ended = _launch_fork("--shutdown=1", RANKS, "hang", str(2 * patience()))
    assert ended.code == 1, ended.err
    head, *rest = _report(ended)
    assert head.startswith("fxtrain launch: Rank 0 of 2 failed: CollectiveError: barrier()")
    assert "rank 1: never joined this barrier" in ended.err, ended.err
    assert (
        "Rank 1 of 2 was still running when another rank failed. It did not exit after SIGTERM, so "
        "the launcher killed it."
    ) in rest
    assert "SIGKILL" not in ended.err


@pytest.mark.parametrize(
    ("how", "codes", "says"),
    slow_after(
        1,
        [
            ("exit", {3}, "exited with code 3."),
            ("interrupt", {1, 130}, "failed: KeyboardInterrupt"),  # 1 of a fork
        ],
    ),
)
def test_a_rank_that_leaves_is_shown_before_those_that_wait_for_it(how, codes, says):
    ended = _launch_fork(RANKS, "leave_meanwhile", how)
    # Rank 0 may be ended before it has told of its CollectiveError.
    assert ended.code in codes
    assert _report(ended)[0] == f"fxtrain launch: Rank 1 of 2 {says}"


@pytest.mark.slow
def test_one_traceback_when_all_fail():
    ended = _launch_fork(RANKS, "all_fail")
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1
    assert "KeyError: 'everywhere'" in ended.err


@pytest.mark.slow
def test_exit_code_is_handed_on_and_nothing_is_left_behind(tmp_path):
    ended = _launch(RANKS, "leave", "200", TMPDIR=str(tmp_path))
    assert ended.code == 200
    assert list(tmp_path.iterdir()) == []
    assert ended.err == "fxtrain launch: Rank 1 of 2 exited with code 200.\n"


def test_crash_names_the_signal_and_the_line():
    ended = _launch_fork(RANKS, "crash")
    assert ended.code == 128 + signal.SIGSEGV
    assert "Rank 1 of 2 was ended by SIGSEGV." in ended.err
    assert "in crash" in ended.err


FAILS_AND_ABORTS = """
import atexit, os, sys, types

sys.modules["torch"] = types.ModuleType("torch")  # as if it were loaded

class Released:
    def __del__(self, abort=os.abort):
        abort()

sys.modules["torch"].kept = Released()
atexit.register(print, "the script's own clean-up")
raise KeyError("the cause")
"""


@pytest.mark.slow
def test_an_abort_in_python_s_last_moments_does_not_hide_the_error(tmp_path):
    """As a gloo thread does that releases a tensor when the interpreter shuts down."""
    (tmp_path / "fails.py").write_text(FAILS_AND_ABORTS)
    ended = _launch(str(tmp_path / "fails.py"), ranks=1)
    assert ended.code == 1
    assert ended.out == "the script's own clean-up\n"
    assert "Rank 0 of 1 failed: KeyError: 'the cause'" in ended.err


def test_restart(tmp_path):
    mark = str(tmp_path / "mark")
    ended = _launch_fork("--restarts", "1", RANKS, "once", mark)
    assert (ended.code, ended.out) == (0, "second attempt"), ended.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_signals_reach_the_ranks(number):
    process = start(*FXTRAIN, "launch", "--ranks", "2", RANKS, "wait")
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    ended = finish(process, timeout_s=30)
    assert ended.code == 128 + number
    assert ended.err == f"fxtrain launch: Stopped by {number.name}.\n"
    _wait_for_end(pids)


@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_launcher():
    process = start(*FXTRAIN, "launch", "--ranks", "2", RANKS, "wait")
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    assert finish(process, timeout_s=30).code == -signal.SIGKILL
    _wait_for_end(pids)


def _wait_for_end(pids):
    wait_for(lambda: not any(map(_runs, pids)))


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_module_that_is_not_there():
    ended = _launch("-m", "tests.launchd")
    assert ended.code == 2
    assert f"no such module on the path that starts in {ROOT}" in ended.err
