"""Where ranks stand: when a run makes no progress, and whenever someone asks."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests._patience import patience, wait_for
from tests.launched._run import FXTRAIN, PYTHON, SCRIPTS, finish, run_fork, start_fork

FRTRACE = "torch.distributed.flight_recorder.fr_trace"


def _launch(folder, how, timeout_s, *, ranks=3):
    return (
        *FXTRAIN,
        "launch",
        f"--ranks={ranks}",
        "--cpu",
        f"--log-dir={folder}",
        str(SCRIPTS / "stuck.py"),
        how,
        str(timeout_s),
        str(folder / "go"),
    )


def _wait_for(path, process):
    wait_for(lambda: path.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()


def _ask(folder, until, *options):
    """What `fxtrain stacks` prints once it has this text, such as that the others wait."""
    asked = []

    def shows():
        asked.append(run_fork(*FXTRAIN, "stacks", str(folder), *options).out)
        return until in asked[-1]

    wait_for(shows)
    return asked[-1]


_WAIT = "ranks 0, 2: waiting at"


def _line_of(text):
    lines = (SCRIPTS / "stuck.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def _check(text, how):
    odd = _line_of("re.match" if how == "lock" else "time.sleep")
    assert f"rank 1: apart from the others, at {SCRIPTS / 'stuck.py'}:{odd} in read_rows" in text
    waits = _line_of("gather(" if how == "gather" else "fx.update(")
    assert f"ranks 0, 2: waiting at {SCRIPTS / 'stuck.py'}:{waits} in main" in text
    assert "after 3 updates, in" in text
    assert ("in gather(float32[1])" in text) == (how == "gather")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["step", "gather", "lock"])
def test_a_run_without_progress_names_the_rank_that_stands_apart(tmp_path, how):
    words = _launch(tmp_path, how, 12 * patience())
    done = run_fork(*words, timeout_s=120, TORCH_FR_BUFFER_SIZE="100")
    assert done.code
    assert re.search(
        r"fxtrain: no progress for \d+ s. 3 of 3 ranks wrote where they stand", done.err
    )
    _check(done.err, how)
    shown = run_fork(*FXTRAIN, "diagnose", str(tmp_path))
    assert shown.code == 0
    _check(shown.out, how)
    dumps = tmp_path / "stacks" / "flight_recorder"
    if how == "lock":  # rank 1 could not write its collectives
        assert f"torchfrtrace --allow-incomplete-ranks {dumps}" in shown.out
        compared = run_fork(*PYTHON, "-m", FRTRACE, "--allow-incomplete-ranks", str(dumps)).err
        assert "we missed FR dumps from ranks ({1})" in compared
        return
    assert f"torchfrtrace {dumps}" in shown.out
    compared = run_fork(*PYTHON, "-m", FRTRACE, str(dumps)).err
    group = "fxtrain-world:world" if how == "gather" else "0:default_pg"
    assert f"group info: {group}\ncollective: gloo:all_" in compared
    assert "missing ranks: {1}" in compared and "stuck.py" in compared
    assert compared.count("sequence number") == 1


@pytest.mark.slow
def test_ranks_are_asked_without_stopping_the_run(tmp_path):
    launched = start_fork(*_launch(tmp_path, "step", 600))
    _wait_for(tmp_path / "stuck", launched)
    _check(_ask(tmp_path, _WAIT), "step")
    values = json.loads(run_fork(*FXTRAIN, "stacks", str(tmp_path), "--json").out)
    assert [one["record"]["models"] for one in values] == [[{"updates": 3, "micro": 0}]] * 3
    assert all(one["record"]["host_memory_bytes"] > 1 << 20 for one in values)
    (tmp_path / "stacks" / "stacks.txt").unlink()
    launched.send_signal(signal.SIGUSR2)
    _wait_for(tmp_path / "stacks" / "stacks.txt", launched)
    (tmp_path / "go").touch()
    done = finish(launched)
    assert done.code == 0, done.err
    assert "finished" in done.out
    _check(done.err, "step")


@pytest.mark.slow
def test_a_rank_whose_interpreter_is_locked_answers_by_the_signal(tmp_path):
    launched = start_fork(*_launch(tmp_path, "lock", 600))
    _wait_for(tmp_path / "stuck", launched)
    odd = f"rank 1: apart from the others, at {SCRIPTS / 'stuck.py'}:{_line_of('re.match')}"
    assert odd in _ask(tmp_path, odd, "--patience-s=1")
    launched.send_signal(signal.SIGTERM)
    finish(launched)


@pytest.mark.slow
def test_a_stopped_rank_is_seen_by_py_spy(tmp_path):
    """Neither its thread nor `faulthandler` can answer."""
    installed = shutil.which("py-spy", path=str(Path(sys.executable).parent)) is not None
    launched = start_fork(*_launch(tmp_path, "step", 600))
    _wait_for(tmp_path / "stuck", launched)
    _ask(tmp_path, _WAIT)
    pid = json.loads((tmp_path / "stacks" / "rank-1.json").read_text())["pid"]
    os.kill(pid, signal.SIGSTOP)
    asked = run_fork(*FXTRAIN, "stacks", str(tmp_path), "--patience-s=1")
    os.kill(pid, signal.SIGCONT)
    launched.send_signal(signal.SIGTERM)
    finish(launched)
    if installed:
        _check(asked.out.replace("after 0 updates", "after 3 updates"), "step")
        assert "no answer" not in asked.out
    else:
        assert "rank 1: the stack is an older one; no answer: py-spy is not" in asked.out
    assert f"--allow-incomplete-ranks {tmp_path}" in asked.out


@pytest.mark.slow
def test_dumps_of_a_program_without_fxtrain_name_the_rank_that_left_a_collective_out(tmp_path):
    for kind in ("pickles", "json"):
        (tmp_path / kind).mkdir()
    script = SCRIPTS / "foreign.py"
    words = (*FXTRAIN, "launch", "--ranks=2", "--cpu", str(script), str(tmp_path))
    done = run_fork(*words, TORCH_FR_BUFFER_SIZE="50")
    assert done.code == 0, done.err
    lines = script.read_text().splitlines()
    first, second = (n for n, line in enumerate(lines, 1) if "dist.all_reduce(" in line)
    shown = run_fork(*FXTRAIN, "diagnose", str(tmp_path / "pickles")).out
    assert (
        f"rank 1: apart from the others, last seen at {script}:{first} in train, "
        f"in all_reduce(Float[2]), call 1 of default_pg\n"
        f"  rank 0: waiting at {script}:{second} in train, "
        f"in all_reduce(Float[3]), call 2 of default_pg\n"
    ) in shown
    of_json = run_fork(*FXTRAIN, "diagnose", str(tmp_path / "json")).out  # which has no stacks
    assert "rank 1: apart from the others, last seen at an unknown line, in all_red" in of_json
