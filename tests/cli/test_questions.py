"""`fxtrain config`: the questions, without a terminal, with one, and what they write."""

import io
import os
import pty
import select
import subprocess
import sys
import time
from typing import Literal

import attrs
import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

import fxtrain as fx
from fxtrain.cli import Exit, main
from fxtrain.cli.config import Question, arrow_keys, interview, next_question, read_answer
from fxtrain.launchers.config import Machine, Section, read_launch_file
from tests.launched._run import FXTRAIN, ROOT

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


DOWN, ENTER = "\x1b[B", "\r"


@pytest.mark.parametrize(
    ("question", "keys", "said"),
    [
        (Question(path="p", text="?", kind="choice", choices=(("a", ""), ("b", "B")), default="a"),
         DOWN + ENTER, "b"),
        (Question(path="p", text="?", kind="choice", choices=(("a", ""), ("b", "B")), default="b"),
         ENTER, "b"),
        (Question(path="p", text="?", kind="yes", default=False), "y", "yes"),
        (Question(path="p", text="?", kind="yes", default=True), ENTER, "yes"),
        (Question(path="p", text="?", kind="whole", default=8), "0" + ENTER, "80"),
        (Question(path="p", text="?", kind="whole", default=8), f"x{ENTER}\x7f2{ENTER}", "82"),
    ],
    ids=["arrow", "default", "yes", "yes by default", "text", "text that is no number"],
)  # fmt: skip
def test_keys_on_a_terminal(question, keys, said):
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        assert arrow_keys(question) == said


class _Terminal:
    """A program on a terminal of its own: what it shows, and keys for it."""

    def __init__(self, *command, cwd):
        self.end, own = pty.openpty()
        # Without the GPUs and the SLURM that the machine may have, which change the questions.
        env = {
            **os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "", "PATH": str(cwd),
        }  # fmt: skip
        self.process = subprocess.Popen(
            command, cwd=cwd, env=env, stdin=own, stdout=own, stderr=own, start_new_session=True
        )
        os.close(own)
        self.shown = ""

    def wait_for(self, text, *, timeout_s=90.0):
        """Read until a text was shown; what comes after it is left for the next call."""
        limit = time.monotonic() + timeout_s
        while text not in self.shown:
            left = limit - time.monotonic()
            assert left > 0 and select.select([self.end], [], [], left)[0], self.shown
            self.shown += os.read(self.end, 4096).decode(errors="replace")
        before, _, self.shown = self.shown.partition(text)
        return before

    def press(self, keys):
        os.write(self.end, keys.encode())

    def leave(self):
        code = self.process.wait(30)
        os.close(self.end)
        return code


@pytest.mark.slow
def test_a_terminal_has_arrow_keys_and_colour(tmp_path):
    terminal = _Terminal(*FXTRAIN, "config", cwd=tmp_path)
    terminal.wait_for("Which launcher starts the ranks?")
    terminal.press(ENTER)
    terminal.wait_for("On how many machines?")
    terminal.press(ENTER)
    terminal.wait_for("How many ranks")
    terminal.press(f"\x7f4{ENTER}")  # in the place of the default
    terminal.wait_for("restart after a failure")
    terminal.press(ENTER)
    terminal.wait_for("How is the model distributed")
    terminal.press(DOWN + ENTER)
    for text in ("What is sharded?", "Class names", "host memory"):
        terminal.wait_for(text)
        terminal.press(ENTER)
    terminal.wait_for("In which precision?")
    terminal.press(DOWN + ENTER)
    for text in ("Micro-batches", "gradient norm", "torch.compile"):
        terminal.wait_for(text)
        terminal.press(ENTER)
    assert "\x1b[" in terminal.wait_for("Wrote fxtrain.toml")
    assert terminal.leave() == Exit.WELL
    found = read_launch_file(tmp_path / "fxtrain.toml")
    assert found.launch == {"ranks": 4}
    assert (found.plan["strategy"]["kind"], found.plan["precision"]) == ("fsdp", "bf16")


def test_ctrl_c_leaves_without_a_file():
    question = Question(path="p", text="?")
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text("\x03")
        with pytest.raises(KeyboardInterrupt):
            arrow_keys(question)


def test_without_questionary_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "questionary", None)
    with pytest.raises(fx.errors.MissingPackageError, match=r"fxtrain\[cli\]"):
        arrow_keys(Question(path="p", text="?"))
