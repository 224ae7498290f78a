"""Spares of a launch: processes that become the ranks of a restart."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fxtrain.cli import Exit, main
from fxtrain.launchers import child
from tests._patience import patience, wait_for
from tests.launched._run import FXTRAIN, SCRIPTS, run_fork

pytestmark = pytest.mark.timeout(200)


def _launch(folder, *options):
    script = str(SCRIPTS / "starts_again.py")
    words = ("launch", "--cpu", "--ranks", "2", "--restarts", "1", *options, script, str(folder))
    done = run_fork(*FXTRAIN, *words)
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
    assert sorted((one["attempt"], one["rank"]) for one in lines[:2]) == [(0, 0), (0, 1)]
    waited = json.loads((folder / "spares").read_text())
    return sorted(lines[2:], key=lambda one: one["rank"]), waited


def _words(process):
    """The command line of a process."""
    try:
        return (process / "cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.slow
def test_spares_become_the_ranks_of_a_restart(tmp_path):
    lines, waited = _launch(tmp_path, "--spares", "1")
    assert [(one["attempt"], one["rank"]) for one in lines] == [(1, 0), (1, 1)]
    for one in lines:
        assert one["args"] == [str(tmp_path)]
        assert not one["spare"]
        assert one["pid"] in waited  # so torch is not imported again, which takes seconds
    assert not [
        words for words in map(_words, Path("/proc").glob("[0-9]*")) if str(tmp_path) in words
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_spare_survives_the_signals_of_ranks(tmp_path):
    """`kill -USR2` to a launcher asks the ranks where they stand. The script may be in Latin-1."""
    script = tmp_path / "script.py"
    script.write_bytes(b"# -*- coding: latin-1 -*-\nimport os\nprint(os.environ['RANK'], '\xe9')\n")
    spare = subprocess.Popen(
        (sys.executable, child.__file__, "script", "--", str(script)),
        env={**os.environ, child.SPARE: "1", "PYTHONIOENCODING": "utf-8"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    numbers = [signal.SIGUSR1, signal.SIGUSR2]
    wait_for(lambda: all(_ignored(spare.pid) >> number - 1 & 1 for number in numbers))
    for number in numbers:
        spare.send_signal(number)
    order = {"env": {**os.environ, "RANK": "7"}, "outputs": [None, None]}
    said, _ = spare.communicate(json.dumps(order), timeout=60 * patience())
    assert (spare.returncode, said) == (0, "7 \xe9\n")


def _ignored(pid):
    """Signals that a process ignores, as bits."""
    return int(re.search(r"SigIgn:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)


def test_spares_need_restarts(capsys):
    script = str(SCRIPTS / "starts_again.py")
    assert main(["launch", "--spares", "1", script]) == Exit.WRONG
    assert "a spare is used when the ranks start again. Set restarts." in capsys.readouterr().err
