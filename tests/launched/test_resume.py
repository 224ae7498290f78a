"""Leaving in order, going on, and the commands that show whether that was exact."""

import json
import runpy
import signal

import pytest

from fxtrain.cli import Exit, main, rerun_commands
from fxtrain.diagnosis import rerun
from fxtrain.testing.cluster import starter
from tests._errors import raises_code
from tests._patience import wait_for
from tests._slow import slow_after
from tests.launched._run import FXTRAIN, PYTHON, ROOT, SCRIPTS, finish, run_fork, start_fork

pytestmark = pytest.mark.timeout(330)

EXAMPLE = str(ROOT / "examples" / "resume.py")


def _last(done):
    return json.loads(done.out.strip().splitlines()[-1])


def _wait_for_another(folder, process, known):
    wait_for(lambda: process.poll() is not None or set(folder.glob("update-*")) - known)
    assert process.poll() is None, process.communicate()


def _told_to_leave(number, words, folder):
    """What a run says that gets a signal once it has saved."""
    known = set(folder.iterdir())
    process = start_fork(*words, "--epochs", "1000")
    _wait_for_another(folder, process, known)
    process.send_signal(number)
    done = finish(process)
    assert done.code == 0, done.err
    told = _last(done)
    assert told["left"] is True
    names = sorted(one.name for one in folder.iterdir())
    assert names[-1].startswith(f"update-{told['updates']:010d}")
    return done.out, told["updates"], names[-1]


def test_a_run_saves_and_leaves_when_told_and_goes_on(tmp_path):
    words = (*PYTHON, EXAMPLE, "--folder", str(tmp_path), "--every", "10")
    _, first, name = _told_to_leave(signal.SIGTERM, words, tmp_path)
    said, second, last = _told_to_leave(signal.SIGUSR1, words, tmp_path)
    assert f"resumed from {tmp_path / name}" in said and second > first

    epochs = second // 57 + 2
    again = run_fork(*words, "--epochs", str(epochs))
    assert again.code == 0, again.err
    assert f"resumed from {tmp_path / last}" in again.out
    told = _last(again)
    assert told["left"] is False and told["updates"] == 57 * epochs


@pytest.mark.slow
def test_one_rank_that_hears_it_is_enough(tmp_path):
    words = (*FXTRAIN, "launch", "--ranks", "2", str(SCRIPTS / "told.py"), str(tmp_path))
    done = run_fork(*words)
    assert done.code == 0, done.err
    told = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert sorted(one["rank"] for one in told) == [0, 1]
    assert {one["left_at"] for one in told} == {5}


@pytest.mark.slow
def test_verify_resume_says_that_a_script_is_exact():
    done = run_fork(
        *FXTRAIN, "verify-resume", "--ranks", "2", "--json", EXAMPLE, "--every", "10", timeout_s=240
    )
    assert done.code == 0, done.err
    told = json.loads(done.out[done.out.index("{") :])
    assert told["equal"] is True and told["differences"] == []
    assert told["checkpoint"] == "update-0000000020" and told["leaves"] > 50


@pytest.fixture
def run_here(monkeypatch):
    """Runs what a launcher runs on a rank in a process that has torch loaded."""

    def launch(program, orders, *, ranks, cpu):
        process = starter().Process(target=rerun.main, args=([json.dumps(orders), *program],))
        process.start()
        process.join(60)
        return process.exitcode

    monkeypatch.setattr(rerun_commands, "_launch", launch)


@pytest.mark.parametrize(
    ("fault", "leaf"),
    slow_after(
        1, [("loader", "position.index"), ("ema", "extra"), ("random", "model/module.weight")]
    ),
)
def test_verify_resume_names_the_first_leaf_that_differs(fault, leaf, run_here, capsys):
    assert main(["verify-resume", str(SCRIPTS / "forgets.py"), fault]) == Exit.FOUND
    told = capsys.readouterr().out
    assert "leaves differ; the first is" in told
    assert f"the first is {leaf}" in " ".join(told.split())


FITS = """
import torch
import fxtrain as fx

with fx.detect() as ctx:
    net = torch.nn.Linear(2, 1)
    model = fx.wrap(net, ctx, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    fns = fx.StepFns(model, lambda model, batch: model(batch.data).square().mean())
    loader = fx.shard(torch.ones(8, 2), ctx, batch_size=2)
    for _ in fx.fit(ctx, fns, loader, "run", updates=4, save_every=2, log_every=1, show=False):
        pass
"""


def test_verify_resume_compares_one_run_and_leaves_the_users_run_alone(
    tmp_path, monkeypatch, run_here, capsys
):
    # A script that seeds nothing: random and NumPy start elsewhere in every process.
    (tmp_path / "train.py").write_text(FITS)
    monkeypatch.chdir(tmp_path)
    done = starter().Process(target=runpy.run_path, args=("train.py",))
    done.start()
    done.join(60)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(files) > 4
    assert main(["verify-resume", "train.py"]) == Exit.WELL
    assert "leaves are bitwise equal" in capsys.readouterr().out
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_verify_resume_of_a_script_that_does_not_save(tmp_path, run_here, capsys):
    script = tmp_path / "train.py"
    script.write_text("print('done')\n")
    assert main(["verify-resume", str(script)]) == Exit.WRONG
    assert "It should call fx.save at least twice" in capsys.readouterr().err


def test_verify_resume_of_a_script_that_is_not_there(tmp_path, capsys):
    (tmp_path / "train.py").touch()
    assert main(["verify-resume", str(tmp_path / "trian.py")]) == Exit.WRONG
    assert "train.py" in capsys.readouterr().err


@pytest.mark.slow
def test_replay_runs_an_update_again(tmp_path, capsys):
    words = (EXAMPLE, "--folder", str(tmp_path), "--every", "10", "--epochs", "1")
    done = run_fork(*PYTHON, *words)
    assert done.code == 0, done.err
    before = sorted(one.name for one in tmp_path.iterdir())
    replay = ("replay", "--checkpoint", str(tmp_path), "--update")
    first = run_fork(*FXTRAIN, *replay, "45", *words)
    assert first.code == 0, first.err
    lines = [json.loads(line) for line in first.out.splitlines() if line.startswith("{")]
    assert [(one["update"], one["micro"]) for one in lines] == [(44, 1), (45, 0)]
    assert lines[1]["applied"] is True and lines[1]["grad_norm"] > 0
    # From an earlier checkpoint the same numbers come out.
    newest = tmp_path / "update-0000000040"
    assert newest.name in before
    newest.rename(tmp_path / "aside")
    second = run_fork(*FXTRAIN, *replay, "45", *words)
    again = [json.loads(line) for line in second.out.splitlines() if line.startswith("{")]
    assert again == lines
    (tmp_path / "aside").rename(newest)
    assert sorted(one.name for one in tmp_path.iterdir()) == before
    assert main([*replay, "5", *words]) == Exit.WRONG
    assert "No complete checkpoint before update 5" in capsys.readouterr().err


def _lasting(folder):
    """What is in a folder, with the contents of its files."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize(("fault", "repeats"), slow_after(1, [("none", True), ("hardware", False)]))
def test_replay_finds_an_update_that_differs_from_itself(
    fault, repeats, tmp_path, run_here, capsys
):
    script = [str(SCRIPTS / "replayed.py"), str(tmp_path), fault]
    done = run_fork(*PYTHON, *script)
    assert done.code == 0, done.err
    before = _lasting(tmp_path)
    replay = ["replay", "--checkpoint", str(tmp_path), "--update", "8", "--times", "2"]
    assert main([*replay, *script]) == (Exit.WELL if repeats else Exit.FOUND)
    told = capsys.readouterr().out
    assert "Updates 5 to 8 from" in told and "update-0000000004, 2 times" in told
    if repeats:
        assert "No update differs from itself" in told and "Replicas are equal." in told
    else:
        # The loop changed a parameter after update 6, so update 7 is the first to compute with it.
        assert "Update 7 differs from itself, in the losses of ranks 0." in told
    assert _lasting(tmp_path) == before


@pytest.mark.slow
def test_replay_tells_a_bug_from_hardware(tmp_path):
    script = [str(SCRIPTS / "replayed.py"), str(tmp_path), "bug"]
    launch = (*FXTRAIN, "launch", "--cpu", "--ranks", "2", *script)
    failed = run_fork(*launch)
    assert failed.code == 1
    assert "Replicas differ after update 8 (2 ranks)" in failed.err
    replay = ("replay", "--checkpoint", str(tmp_path), "--update", "8", "--ranks", "2", "--cpu")
    done = run_fork(*FXTRAIN, *replay, "--times", "2", *script)
    assert done.code == Exit.FOUND, done.err
    assert "No update differs from itself" in done.out
    assert "After update 7 replicas differ, in the same way each time:" in done.out
    assert "ranks 0-1: 1 tensor differs between them: 0.weight" in done.out
    assert "This is a bug" in done.out


def test_replays_that_ran_other_updates_are_refused(tmp_path):
    for name, updates in (("a", (1, 2)), ("b", (1,))):
        folder = tmp_path / name
        folder.mkdir()
        lines = [json.dumps({"update": one, "losses": [], "digests": {}}) for one in updates]
        (folder / "rank-0.jsonl").write_text("\n".join(lines))
    with raises_code("FX600"):
        rerun.read_replays([tmp_path / "a", tmp_path / "b"])
