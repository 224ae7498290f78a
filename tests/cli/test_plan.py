"""`fxtrain plan`: whole scripts in a process that pretends to be one rank of many."""

import json
import xml.etree.ElementTree as ET

import pytest

import fxtrain as fx
from fxtrain.cli import Exit, main
from tests.launched._run import FXTRAIN, ROOT, run
from tests.profiling._dry_runs import DRY_DDP

pytestmark = [DRY_DDP, pytest.mark.usefixtures("process_state")]

TRAIN = """
import os, sys
import torch
import fxtrain as fx

print("from", sys.argv[1:], os.environ["LOCAL_RANK"])
ctx = fx.detect()
plan = fx.Plan(accumulate=int(sys.argv[1]))
model = fx.wrap(torch.nn.Linear(9, 5), ctx, plan, optimizer=lambda p: torch.optim.AdamW(p))
fns = fx.StepFns(model=model, loss=lambda m, b: m(b.data).mean())
loader = torch.utils.data.DataLoader(torch.ones(4000, 9), batch_size=2)
if __name__ == "__main__":
    for batch in fx.shard(loader, ctx, plan):
        fx.step(ctx, batch, fns)
    raise SystemExit("steps were alike long ago")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def _plan(*words, **more):
    return run(*FXTRAIN, "plan", *words, **more)


@pytest.mark.slow
def test_a_script_runs_unchanged_as_one_rank(script, tmp_path):
    saved, picture = tmp_path / "run.json", tmp_path / "run.svg"
    ended = _plan(
        "--world", "64", "--rank", "11", "--mesh", "shard=2", "--device-memory", "1GB",
        "--save", str(saved), "--picture", str(picture), "--json", script, "1",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "from ['1'] 3" in ended.err  # what the script prints is not the result
    found = fx.state.loads(ended.out, fx.state.DryRun)
    assert found == fx.state.loads(saved.read_text(), fx.state.DryRun)
    assert (found.name, found.world, found.rank) == ("train.py", 64, 11)
    assert found.mesh == fx.Mesh(replicate=32, shard=2) and found.problems == ()
    assert found.memory.parameters == (9 * 5 + 5) * 4
    assert [(row.kind, row.axis, row.bytes) for row in found.step] == [("all_reduce", "world", 200)]
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_a_picture_of_another_format_is_refused_before_the_program_runs(script, capsys):
    assert main(["plan", "--world", "8", "--picture", "run.gif", script, "1"]) == Exit.WRONG
    assert (
        "--picture run.gif: the name of a picture ends in .svg, .png, .pdf."
        in capsys.readouterr().err
    )


def test_an_earlier_run_stands_beside(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "120")
    saved = str(tmp_path / "run.json")
    assert main(["plan", "--world", "64", "--save", saved, script, "1"]) == Exit.WELL
    capsys.readouterr()
    assert main(["plan", "--world", "8", "--against", saved, script, "2"]) == Exit.WELL
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["64", "ranks", "8", "ranks"] in lines and ["accumulate", "1", "2"] in lines


def test_a_module_is_a_program_too(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--world", "4", "--save", "run.json", "-m", "train", "1"]) == Exit.WELL
    capsys.readouterr()
    assert json.loads((tmp_path / "run.json").read_text())["name"] == "train"


def test_the_plan_of_a_launch_file_is_used(tmp_path, monkeypatch, capsys):
    path, saved = tmp_path / "train.py", tmp_path / "run.json"
    path.write_text(TRAIN.replace("plan = fx.Plan(accumulate=int(sys.argv[1]))", "plan = None"))
    (tmp_path / "fxtrain.toml").write_text("[plan]\naccumulate = 2\n")
    (tmp_path / "big.toml").write_text("[plan]\naccumulate = 2\nseed = 9\n")
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--world", "4", "--save", str(saved)]
    for more, found in {
        (): fx.Plan(accumulate=2),
        ("--config", "big.toml"): fx.Plan(accumulate=2, seed=9),
    }.items():
        assert main([*words, *more, str(path), "1"]) == Exit.WELL, capsys.readouterr().err
        assert fx.state.loads(saved.read_text(), fx.state.DryRun).plan == found
    assert main([*words, "--config", "none.toml", str(path), "1"]) == Exit.WRONG
    assert "none.toml" in capsys.readouterr().err


def test_what_does_not_fit_is_told_by_the_exit_code(script, capsys):
    words = ["plan", "--world", "8", "--device-memory", "100B", script, "1"]
    assert main(words) == Exit.FOUND
    assert "the device has 100 B" in " ".join(capsys.readouterr().out.split())


def test_a_refused_plan_is_a_finding(tmp_path, capsys):
    path, saved = tmp_path / "single.py", tmp_path / "run.json"
    path.write_text(TRAIN.replace("accumulate=int(sys.argv[1])", "strategy=fx.Single()"))
    assert main(["plan", "--world", "8", "--save", str(saved), str(path)]) == Exit.FOUND
    (problem,) = fx.state.loads(saved.read_text(), fx.state.DryRun).problems
    assert problem.kind == "plan"
    assert problem.where == f"{path}:9"


def test_an_error_of_the_script_is_its_own(tmp_path, capsys):
    path = tmp_path / "wrong.py"
    path.write_text("import fxtrain\nraise KeyError('mine')\n")
    assert main(["plan", "--world", "8", str(path)]) == Exit.FOUND
    told = capsys.readouterr()
    assert told.out == "" and "KeyError: 'mine'" in told.err


def test_a_script_that_never_steps_is_an_error(tmp_path, capsys):
    path = tmp_path / "idle.py"
    path.write_text("import fxtrain as fx\nfx.detect()\n")
    assert main(["plan", "--world", "8", str(path)]) == Exit.WRONG
    assert capsys.readouterr() == (
        "",
        "fxtrain plan: StepError: The dry run of idle.py recorded no update: it ended without a "
        "call of an optimizer's step(). Train at least one batch; check that neither an "
        "argument nor `if __name__ == ...` skips the training. [FX500]\n",
    )


def test_a_result_that_cannot_be_written_is_told(script, capsys):
    words = ["plan", "--world", "2", "--save", "/nowhere/run.json", script, "1"]
    assert main(words) == Exit.WRONG
    assert capsys.readouterr().err.endswith(
        "fxtrain plan: /nowhere/run.json: No such file or directory.\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--world 8 trian.py", "Did you mean 'train.py'?"),
        ("--world 8 --mesh tensor=3 train.py", "this run has 8"),
        ("--world 8 --mesh tensr=2 train.py", "Did you mean 'tensor'?"),
        ("--world 8 --mesh tensor train.py", "shard=8,tensor=2"),
        ("--world 0 train.py", "1 or more"),
        ("--world 8 --rank 8 train.py", "from 0 to 7"),
        ("--world 8 --device-memory much train.py", "80GB"),
    ],
)
def test_a_mistake_is_told_before_the_script_runs(
    words, says, script, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words.split()]) == Exit.WRONG
    told = capsys.readouterr()
    assert told.out == "" and says in told.err and told.err.startswith("fxtrain plan: ")


@pytest.mark.slow
def test_an_example_runs_as_it_is(tmp_path, capsys):
    saved = tmp_path / "run.json"
    words = ["plan", "--world", "16", "--save", str(saved), str(ROOT / "examples" / "chars.py")]
    assert main(words) == Exit.WELL
    found = fx.state.loads(saved.read_text(), fx.state.DryRun)
    assert {row.kind for row in found.step} == {"all_reduce", "send", "recv"}
    assert {row.ranks for row in found.step} == {16}


FAILING = ("--rank-mtbf-h=5000", "--checkpoint-rate=1", "--restart-s=60", "--spares=0,50")


@pytest.mark.slow
def test_goodput_under_failures(script, tmp_path, capsys):
    picture = tmp_path / "goodput.svg"
    options = (*FAILING, f"--goodput-picture={picture}", "--days=5")
    assert main(["plan", "--world=500", *options, script, "1"]) == Exit.WELL
    shown = capsys.readouterr().out
    assert "Goodput of 500 ranks: a failure every 10 h, a checkpoint of" in " ".join(shown.split())
    assert "Best interval:" in shown
    ET.parse(picture)
    assert main(["plan", "--world=500", *FAILING, "--days=5", "--json", script, "1"]) == Exit.WELL
    found = json.loads(capsys.readouterr().out)  # without what the program prints
    assert found["run"]["world"] == 500
    memory = found["run"]["memory"]
    assert (
        found["goodput"]["failures"]["checkpoint_s"] == memory["parameters"] + memory["optimizer"]
    )
    waits, spared = found["goodput"]["rows"]
    assert max(waits) < max(spared) < 1


def test_a_program_that_fails_shows_its_problem_instead_of_goodput(tmp_path, capsys):
    path = tmp_path / "train.py"
    path.write_text("import fxtrain as fx\nwith fx.detect() as ctx:\n    fx.Plan(accumulate=0)\n")
    assert main(["plan", "--world=500", *FAILING, str(path)]) == Exit.FOUND
    shown = " ".join(capsys.readouterr().out.split())
    assert "Plan(accumulate=0): choose a number of at least 1" in shown and "Goodput" not in shown


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rank-mtbf-h=1", "--checkpoint-rate=fast"], "--checkpoint-rate='fast'"),
        (
            ["--rank-mtbf-h=1", "--checkpoint-rate=1GB", "--spares=few"],
            "'few' is not a valid integer range",
        ),
        (["--goodput-picture=x.txt"], "the name of a picture ends in"),
    ],
)
def test_wrong_failures_are_refused_before_the_program_runs(script, options, words, capsys):
    assert main(["plan", "--world=2", *options, script, "1"]) == Exit.WRONG
    assert words in " ".join(capsys.readouterr().err.split())
