"""`fxtrain plan`: whole scripts in a process that pretends to be one rank of many."""

import xml.etree.ElementTree as ET

import pytest

import fxtrain as fx
from fxtrain.cli import Exit, main
from tests.launched._run import FXTRAIN, ROOT, run

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


def test_a_script_runs_unchanged_as_one_rank(script, tmp_path):
    saved, picture = tmp_path / "run.json", tmp_path / "run.svg"
    ended = _plan(
        "--world", "64", "--rank", "11", "--mesh", "shard=2", "--device-memory", "1GB",
        "--save", str(saved), "--picture", str(picture), "--json", script, "1",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "from ['1'] 3" in ended.err  # what the script prints is not the result
    found = fx.loads(ended.out, fx.DryRun)
    assert found == fx.loads(saved.read_text(), fx.DryRun)
    assert (found.name, found.world, found.rank) == ("train.py", 64, 11)
    assert found.mesh == fx.Mesh(replicate=32, shard=2) and found.problems == ()
    assert found.memory.parameters == (9 * 5 + 5) * 4
    assert [(row.kind, row.axis, row.bytes) for row in found.step] == [("all_reduce", "world", 200)]
    assert ET.parse(picture).getroot().tag.endswith("svg")

    # The same program as a module, on fewer ranks, beside the first run, where it does not fit.
    beside = _plan(
        "--world", "8", "--device-memory", "100B", "--against", str(saved), "-m", "train", "2",
        cwd=tmp_path, COLUMNS="120",
    )  # fmt: skip
    assert beside.code == Exit.FOUND, beside.err
    lines = [line.split() for line in beside.out.splitlines()]
    assert ["64", "ranks", "8", "ranks"] in lines and ["accumulate", "1", "2"] in lines
    assert "the device has 100 B" in " ".join(beside.out.split())


def test_a_refused_plan_is_a_finding(tmp_path):
    path = tmp_path / "single.py"
    path.write_text(TRAIN.replace("accumulate=int(sys.argv[1])", "strategy=fx.Single()"))
    ended = _plan("--world", "8", "--json", str(path))
    (problem,) = fx.loads(ended.out, fx.DryRun).problems
    assert (ended.code, problem.kind) == (Exit.FOUND, "plan")
    assert problem.where == f"{path}:9"


def test_an_error_of_the_script_is_its_own(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("import fxtrain\nraise KeyError('mine')\n")
    ended = _plan("--world", "8", str(path))
    assert (ended.code, ended.out) == (Exit.FOUND, "")
    assert "KeyError: 'mine'" in ended.err


def test_a_script_that_never_steps_is_an_error(tmp_path):
    path = tmp_path / "idle.py"
    path.write_text("import fxtrain as fx\nfx.detect()\n")
    ended = _plan("--world", "8", str(path))
    assert (ended.code, ended.out) == (Exit.WRONG, "")
    assert ended.err == (
        "fxtrain plan: StepError: A dry run of idle.py saw no update: it ended without a call of "
        "an optimizer's step(). Let it train at least one batch; was the training left out by an "
        "argument, or by `if __name__ == ...`?\n"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--world 8 trian.py", "Did you mean train.py?"),
        ("--world 8 --mesh tensor=3 train.py", "this run has 8"),
        ("--world 8 --mesh tensr=2 train.py", "Did you mean tensor?"),
        ("--world 8 --mesh tensor train.py", "shard=8,tensor=2"),
        ("--world 0 train.py", "1 or more"),
        ("--world 8 --rank 8 train.py", "from 0 to 7"),
        ("--world 8 --device-memory much train.py", "80GB"),
        ("--world 8 --against old.json train.py", "--save"),
    ],
)
def test_a_mistake_is_told_before_the_script_runs(
    words, says, script, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words.split()]) == Exit.WRONG
    told = capsys.readouterr()
    assert told.out == "" and says in told.err and told.err.startswith("fxtrain plan: ")


def test_an_example_runs_as_it_is(tmp_path):
    ended = _plan("--world", "1024", "--json", str(ROOT / "examples" / "chars.py"))
    assert ended.code == 0, ended.err
    found = fx.loads(ended.out, fx.DryRun)
    assert {row.kind for row in found.step} == {"all_reduce", "all_gather"}
    assert {row.ranks for row in found.step} == {1024}
