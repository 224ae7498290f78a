"""Spares of a launch: processes that become the ranks of a restart."""

import json
from pathlib import Path

import pytest

from fxtrain.cli import Exit, main
from fxtrain.errors import LaunchError
from fxtrain.launchers import LaunchSpec
from tests.launched._run import FXTRAIN, SCRIPTS, run_fork

pytestmark = pytest.mark.timeout(200)


def _launch(folder, *options):
    script = str(SCRIPTS / "starts_again.py")
    words = ("launch", "--cpu", "--ranks", "2", "--restarts", "1", *options, script, str(folder))
    done = run_fork(*FXTRAIN, *words)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert sorted((one["attempt"], one["rank"]) for one in lines[:2]) == [(0, 0), (0, 1)]
    failed = float((folder / "failed-1").read_text())
    return sorted(lines[2:], key=lambda one: one["rank"]), failed


def _words(process):
    """The command line of a process."""
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.slow
def test_spares_become_the_ranks_of_a_restart(tmp_path):
    lines, failed = _launch(tmp_path, "--spares", "1")
    assert [(one["attempt"], one["rank"]) for one in lines] == [(1, 0), (1, 1)]
    for one in lines:
        assert one["args"] == [str(tmp_path)]
        assert not one["spare"]
        assert one["stepped"] - failed < 5  # 7 to 20 s where torch is imported first
    assert not [
        words for words in map(_words, Path("/proc").glob("[0-9]*")) if str(tmp_path) in words
    ]


def test_spares_need_restarts_and_python(capsys):
    script = str(SCRIPTS / "starts_again.py")
    assert main(["launch", "--spares", "1", script]) == Exit.WRONG
    assert "a spare is used when the ranks start again. Set restarts." in capsys.readouterr().err
    with pytest.raises(LaunchError, match="a spare imports the packages of a Python script"):
        LaunchSpec(target="/bin/true", executable=True, spares=1, restarts=1)
