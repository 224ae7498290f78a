"""The mesh and other settings of the launch's plan: flags, variables, and what the script says."""

import logging

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain import ops
from fxtrain.cli import main
from fxtrain.cli.launch_command import LAUNCH, spec_of
from fxtrain.launchers.program import plan_variable
from fxtrain.state.mesh import resolve_mesh
from fxtrain.testing import fake_world
from tests._errors import raises_code
from tests.launched._run import FXTRAIN, run_fork

SCRIPT = """
import fxtrain as fx
with fx.detect(device="cpu") as ctx:
    mine = (ctx.mesh.tensor, ctx.axis("tensor").rank, ctx.given_plan.seed)
    lines = fx.ops.gather_objects(mine, ctx)
    if ctx.is_main:
        print(lines, end="")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def _given(*words):
    spec = spec_of(LAUNCH.make_context("launch", ["--ranks", "4", *words, "train.py"]).params)
    return fx.given_plan(env=dict(line.split("=", 1) for line in spec.env))


def _variables(values):
    return dict([plan_variable(values).split("=", 1)])


def test_the_six_settings_and_the_mesh_have_flags(here):
    words = (
        "--precision bf16 --accumulate 4 --strategy fsdp --clip-norm 1 --batch global --compile "
        "--mesh shard=2,tensor=2"
    )
    assert _given(*words.split()) == fx.Plan(
        precision="bf16",
        accumulate=4,
        strategy=fx.FSDP(),
        clip_norm=1.0,
        batch="global",
        compile=True,
        mesh=fx.Mesh(shard=2, tensor=2),
    )


def test_set_reaches_any_field_and_adds_to_a_short_form(here):
    words = ["--strategy", "fsdp", "--set", "plan.strategy.shard=2", "--set", "plan.seed=7"]
    more = ["--precision", "fp16", "--set", "plan.precision.output=fp32", "--mesh", "tensor=2"]
    found = _given(*words, *more, "--set", "plan.mesh.shard=2", "--set", "launch.restarts=3")
    assert found == fx.Plan(
        strategy=fx.FSDP(shard=2),
        seed=7,
        precision=fx.Precision(compute="fp16", output="fp32"),
        mesh=fx.Mesh(tensor=2, shard=2),
    )
    spec = spec_of(LAUNCH.make_context("launch", ["--set", "launch.ranks=3", "train.py"]).params)
    assert spec.ranks == 3 and spec.env == ()


def test_a_flag_keeps_the_fields_of_the_same_strategy_in_the_file(here):
    (here / "fxtrain.toml").write_text('[plan.strategy]\nkind = "fsdp"\nshard = 2\n')
    assert _given("--strategy", "fsdp").strategy == fx.FSDP(shard=2)
    assert _given("--strategy", "ddp").strategy == fx.DDP()
    assert _given("--set", "plan.strategy=fsdp").strategy == fx.FSDP()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--precision bf17", "plan.precision: found 'bf17'; choose one of 'fp32', 'bf16'"),
        ("--accumulate four", "plan.accumulate: found 'four'; choose a whole number."),
        ("--set plan.accumulate='4'", "found '4'; choose a whole number."),
        ("--set plan.flush=yes", "choose true or false."),
        ("--set plan.sed=1", "unknown key 'sed'"),
        ("--set seed=1", "write a value as launch.ranks=4 or plan.precision=bf16"),
        ("--mesh tensr=2", "Did you mean 'tensor'?"),
        ("--mesh tensor=3", "tensor=3) describes a multiple of 3 ranks, but this run has 4"),
        ("--strategy fspd", "Did you mean 'fsdp'?"),
    ],
)
def test_a_wrong_value_is_an_error_before_anything_starts(here, capsys, words, told):
    assert main(["launch", "--ranks", "4", *words.split(), "--dry", "train.py"]) == 2
    assert told in capsys.readouterr().err


def test_a_script_on_two_ranks_stands_in_the_mesh_of_the_launch(here):
    words = ("--ranks", "2", "--mesh", "tensor=2", "--set", "plan.seed=7", "train.py")
    ended = run_fork(*FXTRAIN, "launch", *words, cwd=here)
    assert (ended.code, ended.out) == (0, "[(2, 0, 7), (2, 1, 7)]"), ended.err


def test_variables_of_a_plan_count_without_fxtrain_launch():
    env = {
        "FXTRAIN_PLAN__STRATEGY": "fsdp",
        "FXTRAIN_PLAN__STRATEGY__MODE": "none",
        "FXTRAIN_PLAN__SEED": "7",
    }
    with fx.detect(env=env, device="cpu") as ctx:
        assert ctx.given_plan == fx.given_plan(env=env)
        assert ctx.given_plan == fx.Plan(strategy=fx.FSDP(mode="none"), seed=7)
    launched = {**env, **_variables({"seed": 8})}  # into which fxtrain launch merged them
    assert fx.given_plan(env=launched) == fx.Plan(seed=8)


@pytest.mark.parametrize("read", [fx.given_plan, fx.detect])
def test_a_variable_that_is_no_part_of_a_plan_is_named(read):
    with raises_code("FX200", "FXTRAIN_PLAN__SED", "'sed'"):
        read(env={"FXTRAIN_PLAN__SED": "7"})
    with raises_code("FX200", "FXTRAIN_PLAN__SEED", "'x'"):
        read(env={"FXTRAIN_PLAN__SEED": "x"})


ADDRESS = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "9"}


def test_a_script_that_asks_for_another_mesh_than_the_launch_is_refused_before_it_waits():
    env = {**ADDRESS, **_variables({"mesh": "tensor=2"})}
    with pytest.raises(fx.errors.MeshError) as error:
        fx.detect(env, device="cpu", mesh=fx.Mesh(shard=2))
    assert "shard=2" in str(error.value) and "tensor=2" in str(error.value)
    with raises_code("FX110", "tensor=2"):
        fx.detect(_variables({"mesh": "tensor=2"}), device="cpu")


def _axes(ctx, env, mesh):
    try:
        with fx.detect(env, device="cpu", mesh=mesh) as placed:
            model = fx.wrap(nn.Linear(2, 2), placed, fx.Plan(strategy="fsdp", mesh=mesh))
            plans = model.plan.mesh, placed.axis("data").given_plan.mesh
            return placed.mesh, ops.gather_objects(ctx.rank, placed.axis("shard")), plans
    except fx.FxError as error:
        return error


def test_the_same_mesh_in_the_script_and_in_the_launch(pair):
    """-1 and a number say the same; the existing process group is reused."""
    env = _variables({"mesh": {"replicate": 1, "shard": 2}})
    mesh = fx.Mesh(replicate=1, shard=-1)
    for answer in pair.run(_axes, env, mesh):
        assert answer == (fx.Mesh(replicate=1, shard=2), [0, 1], (mesh, None))
    for answer in pair.run(_axes, env, fx.Mesh(replicate=2)):
        assert isinstance(answer, fx.errors.MeshError) and "differently" in str(answer)


def test_a_plan_with_another_mesh_than_the_context_names_both():
    with fake_world(4, mesh=fx.Mesh(shard=2)) as ctx:
        fx.wrap(nn.Linear(2, 2), ctx, fx.Plan(strategy="fsdp", mesh="shard=2,replicate=-1"))
        for plan in (fx.Plan(mesh="replicate=4"), fx.Plan(mesh="tensor=2")):
            with pytest.raises(fx.PlanError) as error:
                fx.wrap(nn.Linear(2, 2), ctx, plan)
            assert "has Mesh(replicate=2, shard=2)" in str(error.value)
            assert f"has {resolve_mesh(plan.mesh, 4)}" in str(error.value)
            assert "fx.detect(mesh=plan.mesh)" in str(error.value)
        with raises_code("FX202", "tensor=3"):
            fx.wrap(nn.Linear(2, 2), ctx, fx.Plan(mesh="tensor=3"))


def _launched(ctx, values):
    return attrs.evolve(ctx, given_plan=fx.Plan(**values), given_fields=tuple(values))


def test_a_script_with_a_plan_of_its_own_takes_the_mesh_of_the_launch_without_a_word(caplog):
    own = fx.Plan(precision="bf16", accumulate=2)
    with caplog.at_level(logging.INFO), fake_world(4, mesh=fx.Mesh(tensor=2)) as ctx:
        launched = _launched(ctx, {"mesh": "tensor=2"})
        assert fx.shard(DataLoader(torch.ones(4, 2)), launched, own).plan == own
        assert caplog.messages == []
        launched = _launched(ctx, {"mesh": "tensor=2", "accumulate": 4})
        fx.shard(DataLoader(torch.ones(4, 2)), launched, attrs.evolve(own, seed=1))
        (text,) = caplog.messages
        assert "accumulate is 2 instead of 4" in text and "mesh" not in text


def test_plans_of_earlier_versions_are_read():
    text = fx.state.dumps(fx.Plan(accumulate=2)).replace(',\n  "mesh": null', "")
    assert "mesh" not in text and fx.state.loads(text) == fx.Plan(accumulate=2)
    assert fx.fingerprint(fx.Plan(mesh="tensor=2")) != fx.fingerprint(fx.Plan())
