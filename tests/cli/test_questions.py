"""`fxtrain config`: the questions, without a terminal, with one, and what they write."""

import io
import sys
from typing import Literal

import attrs
import click
import pytest

import fxtrain as fx
from fxtrain.backends import built_in
from fxtrain.cli import Exit, main
from fxtrain.cli.questions import MachineFacts, interview
from fxtrain.launchers.config import read_launch_file

PLAIN = MachineFacts(cores=8)
GPUS = MachineFacts(cores=64, kind="cuda", count=8, bf16=True)


def _asked(machine, **said):
    """Questions by path, in the order in which they are asked; answers by its last part."""
    asked = {}

    def ask(path, text, read):
        assert path not in asked
        asked[path] = text
        return read(said.get(path.rpartition(".")[2], ""))

    values = interview(machine, ask)
    return asked, values


def test_one_machine_has_few_questions():
    paths, values = _asked(PLAIN)
    assert [*paths] == [
        "launch.launcher", "launch.nodes", "launch.ranks", "launch.restarts", "plan.precision",
        "plan.accumulate", "plan.clip_norm", "plan.compile",
    ]  # fmt: skip
    assert values == {"launch": {"ranks": 1}, "plan": {}}


def test_defaults_come_from_the_machine():
    paths, values = _asked(GPUS)
    assert values == {"launch": {"ranks": 8}, "plan": {"precision": "bf16"}}
    assert {"launch.cpu", "plan.strategy.kind"} <= set(paths) and "launch.gpus" not in paths
    for machine, launcher in (
        (MachineFacts(slurm=True), "slurm"),
        (MachineFacts(tpu=True), "tpu-pod"),
    ):
        asked, _ = _asked(machine)
        assert asked["launch.launcher"].endswith(f" [{launcher}]")


def test_several_machines_have_to_meet():
    paths, values = _asked(
        PLAIN, nodes="2", main_address="n0", rendezvous="c10d", restarts="3", ranks="4"
    )
    assert {"launch.main_address", "launch.main_port", "launch.rendezvous"} <= set(paths)
    assert values["launch"] == {
        "ranks": 4, "nodes": 2, "main_address": "n0", "main_port": 29500, "rendezvous": "c10d",
        "restarts": 3,
    }  # fmt: skip


def test_some_of_the_accelerators():
    _, values = _asked(GPUS, ranks="2", gpus="0, 3")
    assert values["launch"]["gpus"] == ["0", "3"]
    paths, values = _asked(GPUS, ranks="2", cpu="yes")
    assert "launch.gpus" not in paths and values["launch"]["cpu"] is True


@pytest.mark.parametrize(
    ("launcher", "option", "said"),
    [("slurm", "partition", "gpu"), ("kubernetes", "image", "me/train:1"), ("tpu-pod", "name", "p"),
     ("sagemaker", "role", "me"), ("mpi", "hostfile", "hosts"), ("ray", "job_server", "http://h")],
)  # fmt: skip
def test_a_launcher_has_questions_of_its_own(launcher, option, said):
    paths, values = _asked(PLAIN, launcher=launcher, **{option: said})
    assert f"launch.options.{option}" in paths
    assert values["launch"]["launcher"] == launcher
    assert values["launch"]["options"][option] == said


@attrs.frozen(kw_only=True)
class Mine:
    """A strategy of another package."""

    kind: Literal["mine"] = "mine"


def test_strategies_of_installed_packages_are_choices(installed):
    entry = attrs.evolve(built_in(fx.Single), name="Mine", config=Mine)
    installed("[fxtrain.strategies]\nmine = somewhere:ENTRY", ENTRY=entry)
    asked, values = _asked(GPUS, kind="mine")
    assert "\n  mine: A strategy of another package.\n" in asked["plan.strategy.kind"]
    assert values["plan"]["strategy"] == {"kind": "mine"}


def test_clipping_and_compiling():
    _, values = _asked(PLAIN, clip_norm="0.5", compile="y", accumulate="4", precision="fp16")
    assert values["plan"] == {
        "clip_norm": 0.5, "accumulate": 4, "precision": "fp16", "compile": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "path", "value"),
    [({"compile": "Y"}, "plan.compile", True), ({"ranks": " 7 "}, "launch.ranks", 7),
     ({"clip_norm": "1e3"}, "plan.clip_norm", 1000.0), ({"clip_norm": ".5"}, "plan.clip_norm", 0.5),
     ({"ranks": "2", "gpus": "0, 1,"}, "launch.gpus", ["0", "1"])],
)  # fmt: skip
def test_an_answer_is_read(said, path, value):
    _, values = _asked(GPUS, **said)
    table, _, name = path.partition(".")
    assert values[table][name] == value


@pytest.mark.parametrize(
    "said",
    [{"launcher": "3"}, {"compile": "maybe"}, {"ranks": "-1"}, {"nodes": "9" * 20},
     {"clip_norm": "x"}],
)  # fmt: skip
def test_what_is_no_answer_is_told(said):
    with pytest.raises(click.UsageError, match="not"):
        _asked(PLAIN, **said)


def _typed(monkeypatch, tmp_path, *lines):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    monkeypatch.setattr("fxtrain._extensions.detect_machine", lambda: PLAIN)
    return main(["config"])


def test_lines_make_a_file(tmp_path, monkeypatch, capsys):
    lines = ["native", "1", "3", "", "", "bf16", "2", "1.0", ""]
    assert _typed(monkeypatch, tmp_path, *lines) == Exit.WELL
    assert read_launch_file("fxtrain.toml").values == {
        "launch": {"ranks": 3}, "plan": {"precision": "bf16", "accumulate": 2, "clip_norm": 1.0},
    }  # fmt: skip
    assert "How many ranks on each machine?" in capsys.readouterr().out
    assert main(["config"]) == Exit.WRONG
    assert "already exists" in capsys.readouterr().err


def test_an_answer_that_does_not_fit_is_asked_for_again(tmp_path, monkeypatch, capsys):
    lines = ["native", "1", "lots", "0", "2", *[""] * 6]
    assert _typed(monkeypatch, tmp_path, *lines) == Exit.WELL
    assert read_launch_file("fxtrain.toml").launch.ranks == 2
    told = capsys.readouterr().out
    assert "not a valid integer" in told and "at least 1" in told


def test_answers_that_end_early_leave_no_file(tmp_path, monkeypatch):
    assert _typed(monkeypatch, tmp_path, "native") == Exit.INTERRUPTED
    assert not (tmp_path / "fxtrain.toml").exists()
