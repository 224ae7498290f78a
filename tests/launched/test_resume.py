"""Leaving in order, going on, and the commands that show whether that was exact."""

import json
import signal
import time

import pytest

from tests.launched._run import FXTRAIN, PYTHON, ROOT, SCRIPTS, finish, run, start

pytestmark = pytest.mark.timeout(330)

EXAMPLE = str(ROOT / "examples" / "resume.py")


def _last(done):
    return json.loads(done.out.strip().splitlines()[-1])


def _wait_for(path, process):
    end = time.monotonic() + 90
    while not any(path.glob("update-*")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "no checkpoint came"
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=lambda one: one.name)
def test_a_run_saves_and_leaves_when_told_and_goes_on(number, tmp_path):
    words = (*PYTHON, EXAMPLE, "--folder", str(tmp_path), "--every", "10")
    process = start(*words, "--epochs", "1000")
    _wait_for(tmp_path, process)
    process.send_signal(number)
    done = finish(process)
    assert done.code == 0, done.err
    told = _last(done)
    assert told["left"] is True
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names[-1].startswith(f"update-{told['updates']:010d}")

    epochs = told["updates"] // 57 + 2
    again = run(*words, "--epochs", str(epochs))
    assert again.code == 0, again.err
    assert f"going on from {tmp_path / names[-1]}" in again.out
    told = _last(again)
    assert told["left"] is False and told["updates"] == 57 * epochs


def test_one_rank_that_hears_it_is_enough(tmp_path):
    words = (*FXTRAIN, "launch", "--ranks", "2", str(SCRIPTS / "told.py"), str(tmp_path))
    done = run(*words)
    assert done.code == 0, done.err
    told = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert sorted(one["rank"] for one in told) == [0, 1]
    assert {one["left_at"] for one in told} == {5}


def test_verify_resume_says_that_a_script_is_exact():
    done = run(*FXTRAIN, "verify-resume", "--ranks", "2", "--json", EXAMPLE, timeout_s=240)
    assert done.code == 0, done.err
    told = json.loads(done.out[done.out.index("{") :])
    assert told["equal"] is True and told["differences"] == []
    assert told["checkpoint"] == "update-0000000080" and told["leaves"] > 50


@pytest.mark.parametrize(
    ("fault", "leaf"),
    [("loader", "position.index"), ("ema", "extra"), ("random", "model/module.weight")],
)
def test_verify_resume_names_the_first_leaf_that_differs(fault, leaf):
    done = run(*FXTRAIN, "verify-resume", str(SCRIPTS / "forgets.py"), fault, timeout_s=240)
    assert done.code == 1, done.err
    assert "leaves differ; the first is" in done.out
    assert f"the first is {leaf}" in " ".join(done.out.split())


def test_verify_resume_of_a_script_that_does_not_save(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('done')\n")
    done = run(*FXTRAIN, "verify-resume", str(script))
    assert done.code == 2
    assert "It should call fx.save at least twice" in done.err
    missing = run(*FXTRAIN, "verify-resume", str(tmp_path / "trian.py"))
    assert missing.code == 2 and "train.py" in missing.err


def test_replay_runs_an_update_again(tmp_path):
    words = (EXAMPLE, "--folder", str(tmp_path), "--every", "10", "--epochs", "1")
    done = run(*PYTHON, *words)
    assert done.code == 0, done.err
    before = sorted(one.name for one in tmp_path.iterdir())
    replay = (*FXTRAIN, "replay", "--checkpoint", str(tmp_path), "--update")
    first = run(*replay, "45", *words)
    assert first.code == 0, first.err
    lines = [json.loads(line) for line in first.out.splitlines() if line.startswith("{")]
    assert [(one["update"], one["micro"]) for one in lines] == [(44, 1), (45, 0)]
    assert lines[1]["applied"] is True and lines[1]["grad_norm"] > 0
    # From an earlier checkpoint the same numbers come out.
    newest = tmp_path / "update-0000000040"
    assert newest.name in before
    newest.rename(tmp_path / "aside")
    second = run(*replay, "45", *words)
    again = [json.loads(line) for line in second.out.splitlines() if line.startswith("{")]
    assert again == lines
    (tmp_path / "aside").rename(newest)
    assert sorted(one.name for one in tmp_path.iterdir()) == before
    none = run(*replay, "5", *words)
    assert none.code == 2 and "no whole checkpoint before update 5" in none.err
