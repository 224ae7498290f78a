"""`fxtrain tpu-config`: the recorded command line; no test has gcloud itself."""

import json
import shlex

import pytest

from fxtrain.cli import Exit, main

FILE = """
[launch]
launcher = "tpu-pod"
options = { name = "pod", zone = "us-c", python = "python3.11", setup = ["cd /usr/share"] }
"""
SSH = ["gcloud", "compute", "tpus", "tpu-vm", "ssh"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "fxtrain.toml").write_text(FILE)
    return tmp_path


def _line(capsys, *words):
    assert main(["tpu-config", *words, "--dry"]) == Exit.WELL
    return shlex.split(capsys.readouterr().out)


def test_the_pod_of_the_launch_file(here, capsys):
    assert _line(capsys, "--command", "ls -l", "--command", "df", "--install", "fxtrain[cli]") == [
        *SSH, "pod", "--zone=us-c", "--worker=all",
        "--command=cd /usr/share && python3.11 -m pip install 'fxtrain[cli]' && ls -l && df",
    ]  # fmt: skip


def test_the_setup_of_the_launch_file_is_enough(here, capsys):
    assert _line(capsys)[-1] == "--command=cd /usr/share"


def test_another_pod_and_a_file_of_commands(here, capsys):
    (here / "fxtrain.toml").unlink()
    (here / "commands").write_text("# first\nls\n\ndf\n")
    words = ["--name", "p", "--zone", "z", "--command-file", "commands"]
    assert _line(capsys, *words) == [*SSH, "p", "--zone=z", "--worker=all", "--command=ls && df"]
    assert main(["tpu-config", *words, "--json"]) == Exit.WELL
    assert json.loads(capsys.readouterr().out)["argv"][5] == "p"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--command", "ls"], "the option name"),
        (["--name", "p"], "nothing to run"),
        (["--name", "p", "--command", "ls"], "gcloud is not on the PATH"),
        (["--command-file", "nowhere"], "nowhere"),
    ],
    ids=["name", "commands", "gcloud", "file"],
)
def test_what_is_missing_is_told(words, says, here, capsys):
    (here / "fxtrain.toml").unlink()
    assert main(["tpu-config", *words]) == Exit.WRONG
    assert says in capsys.readouterr().err


def test_the_code_of_gcloud_counts(here):
    for code, expected in ((0, Exit.WELL), (3, Exit.FOUND)):
        (here / "gcloud").write_text(f"#!/bin/sh\nexit {code}\n")
        (here / "gcloud").chmod(0o755)
        assert main(["tpu-config", "--command", "ls"]) == expected
