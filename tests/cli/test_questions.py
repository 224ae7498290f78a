"""`fxtrain config`: the questions, without a terminal, with one, and what they write."""

import io
import sys
from typing import Literal

import attrs
import pytest

from fxtrain.cli import Exit, main
from fxtrain.cli.config import Question, interview, next_question, read_answer
from fxtrain.launchers.config import Machine, Section, read_launch_file

PLAIN = Machine(cores=8)
GPUS = Machine(cores=64, kind="cuda", count=8, bf16=True)


def _asked(machine, **said):
    """Paths in the order in which they are asked; answers by the last part of the path."""
    paths = []

    def way(question):
        paths.append(question.path)
        return said.get(question.path.rpartition(".")[2], "")

    return paths, interview(machine, way)


def test_one_machine_has_few_questions():
    paths, section = _asked(PLAIN)
    assert paths == [
        "launch.launcher", "launch.nodes", "launch.ranks", "launch.restarts", "plan.precision",
        "plan.accumulate", "plan.clip_norm", "plan.compile",
    ]  # fmt: skip
    assert section == Section(launch={"ranks": 1})


def test_defaults_come_from_the_machine():
    paths, section = _asked(GPUS)
    assert section == Section(launch={"ranks": 8}, plan={"precision": "bf16"})
    assert {"launch.cpu", "plan.strategy.kind"} <= set(paths) and "launch.gpus" not in paths
    assert next_question({}, Machine(slurm=True)).default == "slurm"
    assert next_question({}, Machine(tpu="pod")).default == "tpu-pod"


def test_several_machines_have_to_meet():
    paths, section = _asked(
        PLAIN, nodes="2", main_address="n0", rendezvous="c10d", restarts="3", ranks="4"
    )
    assert {"launch.main_address", "launch.main_port", "launch.rendezvous"} <= set(paths)
    assert section.launch == {
        "ranks": 4, "nodes": 2, "main_address": "n0", "main_port": 29500, "rendezvous": "c10d",
        "restarts": 3,
    }  # fmt: skip


def test_some_of_the_accelerators():
    _, section = _asked(GPUS, ranks="2", gpus="0, 3")
    assert section.launch["gpus"] == ["0", "3"]
    paths, section = _asked(GPUS, ranks="2", cpu="yes")
    assert "launch.gpus" not in paths and section.launch["cpu"] is True


@pytest.mark.parametrize(
    ("launcher", "option", "said"),
    [("slurm", "partition", "gpu"), ("kubernetes", "image", "me/train:1"), ("tpu-pod", "name", "p"),
     ("sagemaker", "role", "me"), ("mpi", "hostfile", "hosts"), ("ray", "job_server", "http://h")],
)  # fmt: skip
def test_a_launcher_has_questions_of_its_own(launcher, option, said):
    paths, section = _asked(PLAIN, launcher=launcher, **{option: said})
    assert f"launch.options.{option}" in paths
    assert section.launch["launcher"] == launcher
    assert section.launch["options"][option] == said


@attrs.frozen(kw_only=True)
class Mine:
    """A strategy of another package."""

    kind: Literal["mine"] = "mine"


def test_strategies_of_installed_packages_are_choices():
    machine = attrs.evolve(GPUS, strategies=(Mine,))
    asked = next_question({"launch.launcher": "native", "launch.nodes": 1, "launch.ranks": 8,
                           "launch.cpu": False, "launch.restarts": 0}, machine)  # fmt: skip
    assert ("mine", "A strategy of another package.") in asked.choices
    _, section = _asked(machine, kind="mine")
    assert section.plan["strategy"] == {"kind": "mine"}


def test_an_answer_that_does_not_fit_is_asked_for_again(capsys):
    answers = iter(["lots", "0", "2"])
    seen = []

    def way(question):
        seen.append(question.path)
        return next(answers) if question.path == "launch.ranks" else ""

    assert interview(PLAIN, way).launch["ranks"] == 2
    assert seen.count("launch.ranks") == 3
    told = capsys.readouterr().err
    assert "choose a whole number" in told and "at least 1" in told


def test_clipping_and_compiling():
    _, section = _asked(PLAIN, clip_norm="0.5", compile="y", accumulate="4", precision="3")
    assert section.plan == {
        "clip_norm": 0.5, "accumulate": 4, "precision": "fp16", "compile": {"backend": "inductor"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "said", "value"),
    [("choice", "2", "b"), ("choice", "a", "a"), ("yes", "Y", True), ("whole", " 7 ", 7),
     ("number", "1e3", 1000), ("number", "0.5", 0.5), ("words", "a, b,", ["a", "b"]),
     ("text", " x ", "x"), ("text", "", None)],
)  # fmt: skip
def test_an_answer_is_read(kind, said, value):
    question = Question(path="p", text="?", kind=kind, choices=(("a", ""), ("b", "")))
    assert read_answer(question, said) == value


@pytest.mark.parametrize(
    ("kind", "said"),
    [("choice", "3"), ("choice", "0"), ("yes", "maybe"), ("whole", "-1"), ("whole", "9" * 20),
     ("number", "x")],
)  # fmt: skip
def test_what_is_no_answer_is_told(kind, said):
    question = Question(path="p", text="?", kind=kind, choices=(("a", ""), ("b", "")))
    with pytest.raises(ValueError, match="not"):
        read_answer(question, said)


def test_lines_make_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = ["native", "1", "3", "", "", "2", "2", "1.0", ""]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    monkeypatch.setattr("fxtrain.cli.config.detect_machine", lambda: PLAIN)
    assert main(["config"]) == Exit.WELL
    file = read_launch_file("fxtrain.toml")
    assert file.section("") == Section(
        launch={"ranks": 3}, plan={"precision": "bf16", "accumulate": 2, "clip_norm": 1.0}
    )
    assert "How many ranks on each machine?" in capsys.readouterr().out


def test_answers_that_end_early_are_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("native\n"))
    assert main(["config"]) == Exit.WRONG
    assert "No answer to 'On how many machines?'" in capsys.readouterr().err
    assert not (tmp_path / "fxtrain.toml").exists()


@pytest.mark.parametrize("name", ["fxtrain.toml", "fxtrain.yaml"])
def test_a_profile_is_added_to_a_file(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    toml = name.endswith("toml")
    first = (
        "# mine\n[profiles.a.launch]\nranks = 2\n"
        if toml
        else "profiles: {a: {launch: {ranks: 2}}}"
    )
    (tmp_path / name).write_text(first)

    def answer(*words):
        monkeypatch.setattr(sys, "stdin", io.StringIO("native\n1\n5\n" + "\n" * 9))
        return main(["config", "-c", name, *words])

    assert answer("--profile", "b") == Exit.WELL
    profiles = read_launch_file(name).profiles
    assert (profiles["a"].launch["ranks"], profiles["b"].launch["ranks"]) == (2, 5)
    assert answer("--profile", "a") == Exit.WRONG
    assert answer("--profile", "a", "--force") == Exit.WELL
    assert read_launch_file(name).profiles["a"].launch["ranks"] == 5
    assert ("# mine" in (tmp_path / name).read_text()) == toml
    assert answer() == Exit.WRONG
    assert "already exists" in capsys.readouterr().err
