"""`fxtrain plan --choose`: a script under many plans, and the launch file of the best."""

import functools
import json

import pytest

import fxtrain as fx
from fxtrain.choosing.trials import workers
from fxtrain.cli import Exit, main
from fxtrain.cli.choose_command import run_script
from fxtrain.launchers.config import read_launch_file
from tests.profiling._dry_runs import DRY_DDP

pytestmark = DRY_DDP

TRAIN = """
import argparse
import torch
import fxtrain as fx

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
rows = parser.parse_args().batch_size
print("not the result")
with fx.detect() as ctx:
    net = torch.nn.Linear(9, 5)
    model = fx.wrap(net, ctx, PLAN, optimizer=lambda p: torch.optim.AdamW(p))
    fns = fx.StepFns(model=model, loss=lambda m, b: m(b.data).mean())
    loader = torch.utils.data.DataLoader(torch.ones(4000, 9), batch_size=rows)
    for batch in fx.shard(loader, ctx, PLAN):
        fx.step(ctx, batch, fns)
"""
SMALL = """
name = "small"
memory = 100_000
flops = {fp32 = 1e12}
memory_bandwidth = 1e12
launch_s = 1e-6
link_bandwidth = 1e11
link_latency_s = 1e-6
node_bandwidth = 1e10
node_latency_s = 1e-5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch, process_state):
    """A script and a device in a folder of their own, without an earlier answer."""
    (tmp_path / "train.py").write_text(TRAIN.replace("PLAN", "fx.given_plan(fx.Plan(seed=3))"))
    (tmp_path / "small.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def _choose(*words, device="small.toml"):
    return main(
        ["plan", "--choose", "--world", "4", "--device", device, "--processes", "1", *words]
    )


@pytest.mark.slow
def test_the_best_plan_is_a_launch_file(folder, capsys):
    assert _choose("--json", "--save", "best.toml", "train.py") == Exit.WELL
    out = capsys.readouterr().out
    data = json.loads(out)  # nothing that the script prints
    assert data["rows"] == 16 and data["world"] == 4
    best = read_launch_file("best.toml")
    assert (best.launch.target, best.launch.args, best.launch.world_size) == ("train.py", (), 4)
    plan = data["plans"][0]["plan"]
    assert best.plan.mesh == fx.Mesh(**plan["mesh"]) and plan["seed"] == 3
    assert main(["launch", "--config", "best.toml", "--cpu", "--dry"]) == Exit.WELL
    assert "FXTRAIN_PLAN" in capsys.readouterr().out
    # The same question again has the same answer, from the cache.
    stamps = {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*.json")}
    assert stamps and _choose("--json", "train.py") == Exit.WELL
    assert capsys.readouterr().out == out
    assert stamps == {path: path.stat().st_mtime_ns for path in (folder / "cache").rglob("*.json")}


@pytest.mark.slow
def test_the_batch_size_is_an_option_of_the_script(capsys):
    how = ("--json", "--rows", "64", "--batch-option", "--batch-size", "--save", "best.toml")
    assert _choose(*how, "train.py", "--batch-size=2") == Exit.WELL
    assert json.loads(capsys.readouterr().out)["rows"] == 64
    best = read_launch_file("best.toml")
    assert best.launch.args == ("--batch-size", "16") and best.plan.accumulate == 1


@pytest.mark.slow
def test_a_script_with_its_own_plan_keeps_it(folder, capsys):
    (folder / "train.py").write_text(TRAIN.replace("PLAN", "fx.Plan(seed=3)"))
    assert _choose("train.py") == Exit.WELL
    words = " ".join(capsys.readouterr().out.split())
    assert "DDP, replicate=4, batch 4" in words and "passes another plan to fx.wrap" in words


@pytest.mark.slow
def test_exit_code_1_where_nothing_fits(folder, capsys):
    (folder / "small.toml").write_text(SMALL.replace("100_000", "100"))
    (folder / "fxtrain.toml").write_text('[plan]\nstrategy = "ddp"\n')
    assert _choose("--save", "best.toml", "train.py") == Exit.FOUND
    words = " ".join(capsys.readouterr().out.split())
    assert "no plan fits. Parameters, gradients and optimizer states need at least" in words
    assert not (folder / "best.toml").exists()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("--device", "H1000", "train.py"), "known are A100, H100"),
        (("--device", "H100", "--save", "best.txt", "train.py"), "ends in .json"),
        (("--device", "H100", "--mesh", "shard=3", "train.py"), "this run has 4"),
        (("train.py",), "--choose needs --device"),
        (("--device", "H100", "none.py"), "none.py"),
    ],
)
def test_wrong_arguments_are_named_before_a_dry_run(words, found, capsys):
    assert main(["plan", "--choose", "--world", "4", *words]) == Exit.WRONG
    assert found in " ".join(capsys.readouterr().err.split())


def test_a_script_that_never_updates_is_an_error(folder, capsys):
    (folder / "idle.py").write_text("import fxtrain as fx\nfx.detect()\n")
    assert _choose("idle.py") == Exit.WRONG
    assert "The dry run of idle.py recorded no update" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_of_its_own_runs_the_script(folder):
    program = functools.partial(run_script, "train.py", (), "", "{}", module=False)
    with workers(program, 2, 600.0) as pool:
        run = pool.submit(program, (fx.Plan(), 0), 4, 0, str).result()
    assert run.world == 4 and run.updates >= 2
