"""The plan of a launch file, in the script."""

import pytest

import fxtrain as fx
from fxtrain.cli.launch_command import LAUNCH, spec_of
from tests.launched._run import FXTRAIN, run_fork

SCRIPT = "import fxtrain as fx\nprint(fx.given_plan(fx.Plan(seed=9)).accumulate, end='')\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "fxtrain.toml").write_text(
        "[launch]\nranks = 1\n[profiles.more.plan]\naccumulate = 4\n"
    )
    return tmp_path


def _spec(*words):
    return spec_of(LAUNCH.make_context("launch", list(words)).params)


def test_it_travels_in_a_variable(here):
    assert _spec("train.py").env == ()  # nothing sets a plan
    (variable,) = _spec("--profile", "more", "train.py").env
    name, _, value = variable.partition("=")
    assert fx.given_plan(env={name: value}) == fx.Plan(accumulate=4)


def test_the_script_finds_it(here):
    ended = run_fork(*FXTRAIN, "launch", "--profile", "more", "train.py", cwd=here)
    assert (ended.code, ended.out) == (0, "4"), ended.err


def test_without_one_the_default_counts():
    assert fx.given_plan(env={}) == fx.Plan()
    assert fx.given_plan(fx.Plan(seed=9), env={}) == fx.Plan(seed=9)


@pytest.mark.parametrize("text", ["", "{", '{"sed": 1}', "3"])
def test_a_variable_that_is_no_plan_is_named(text):
    with pytest.raises(fx.PlanError, match="FXTRAIN_PLAN"):
        fx.given_plan(env={"FXTRAIN_PLAN": text})
