"""Ranks under real SLURM. `tests/launched/slurm.sh` starts a cluster of one node for them.

tests/launched/slurm.sh python -m pytest tests/launched/test_slurm.py
"""

import json
import os
import shutil
import subprocess

import pytest

from tests._patience import wait_for
from tests.launched._run import FXTRAIN, SCRIPTS, run

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        shutil.which("srun") is None or "fxtrain-slurm" not in os.environ.get("SLURM_CONF", ""),
        reason="no cluster of tests/launched/slurm.sh",
    ),
]
RANKS = str(SCRIPTS / "ranks.py")
LAUNCH = (*FXTRAIN, "launch", "--launcher", "slurm", "-n", "2")
IN_A_JOB = ("salloc", "--quiet", "--ntasks=2", *LAUNCH)


def test_ranks_of_an_allocation_meet():
    ended = run(*IN_A_JOB, "--env", "ODD=a;b, c=$d", RANKS, "meet", "ODD", "x y", '"$z"')
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told["launcher"] == "slurm"
    assert told["places"] == [[0, 0, 0, 1], [1, 1, 0, 1]]
    assert told["total"] == 3.0
    assert told["value"] == "a;b, c=$d"
    assert told["args"] == ["meet", "ODD", "x y", '"$z"']


def test_the_first_failing_rank_is_shown():
    ended = run(*IN_A_JOB, RANKS, "fail")
    assert ended.code == 1
    assert "fxtrain launch: Rank 1 of 2 failed: ValueError: of my own\n" in ended.err
    assert ended.err.count("Traceback (most recent call last)") == 1


def test_an_exit_code_is_handed_on():
    ended = run(*IN_A_JOB, RANKS, "leave", "3", timeout_s=40)
    assert ended.code == 3
    assert "fxtrain launch: Rank 1 of 2 exited with code 3.\n" in ended.err


@pytest.mark.timeout(300)
def test_a_preempted_job_saves_and_is_run_again(tmp_path):
    ended = run(
        *LAUNCH, "-o", "time=5", "-o", f"output={tmp_path}/out.txt", "--env", "A=x;y z",
        RANKS, "preempted", str(tmp_path), cwd=tmp_path,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert ended.out.startswith("Submitted batch job ")
    job = ended.out.split()[-1]
    wait_for(lambda: len(list(tmp_path.glob("ready*"))) == 2)
    # What SLURM sends by --signal=B:USR1@120 when the time is nearly up.
    _slurm("scancel", "--signal=USR1", "--batch", job)
    wait_for(lambda: len(list(tmp_path.glob("saved*"))) == 2)
    out = tmp_path / "out.txt"
    # SLURM waits for a while before it runs a job again.
    wait_for(lambda: out.exists() and out.read_text().count("went on") == 2, timeout_s=180.0)
    wait_for(lambda: "COMPLETED" in _slurm("scontrol", "show", "job", job))


def _slurm(*words):
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout
