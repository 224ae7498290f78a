"""Ranks under real MPI: Open MPI's mpirun and MPICH's, where they are installed."""

import json
import shutil
import signal

import pytest

from tests.launched._run import FXTRAIN, SCRIPTS, finish, run, start

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(120)]
RANKS = str(SCRIPTS / "ranks.py")
# Debian's names, with which both can be installed at once.
PROGRAMS = {"openmpi": ("mpirun.openmpi", "mpirun"), "mpich": ("mpirun.mpich", "mpirun")}


@pytest.fixture(params=sorted(PROGRAMS))
def mpi(request):
    """Words that launch two ranks under one MPI."""
    found = next((name for name in PROGRAMS[request.param] if shutil.which(name)), None)
    if found is None:
        pytest.skip(f"{request.param} is not installed (apt-get install {request.param})")
    words = ("--launcher", "mpi", "-o", f"program={found}", "-o", f"kind={request.param}")
    return request.param, (*FXTRAIN, "launch", *words, "-n", "2")


def test_ranks_meet_and_get_what_they_were_sent(mpi):
    name, words = mpi
    ended = run(*words, "--env", 'ODD=a;b, c=$d "q"', RANKS, "meet", "ODD", "x y", "$z;")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert told["launcher"] == name
    assert told["places"] == [[0, 0, 0, 1], [1, 1, 0, 1]]
    assert told["total"] == 3.0
    assert told["value"] == 'a;b, c=$d "q"'
    assert told["args"] == ["meet", "ODD", "x y", "$z;"]


def test_the_first_failing_rank_is_shown(mpi):
    _, words = mpi
    ended = run(*words, RANKS, "fail")
    assert ended.code == 1
    assert ended.err.startswith("fxtrain launch: Rank 1 of 2 failed: ValueError: of my own\n")
    assert ended.err.count("Traceback (most recent call last)") == 1
    assert "child.py" not in ended.err


@pytest.mark.parametrize(("code", "seen"), [("3", 3), ("-1", 255)])
def test_an_exit_code_is_handed_on_and_ends_the_others(mpi, code, seen):
    _, words = mpi
    ended = run(*words, RANKS, "leave", code, timeout_s=40)  # the other rank would sleep 60 s
    assert ended.code == seen
    assert ended.err.endswith(f"fxtrain launch: Rank 1 of 2 exited with code {seen}.\n")


def test_a_signal_ends_the_ranks(mpi):
    name, words = mpi
    process = start(*words, RANKS, "wait")
    assert len([process.stdout.readline() for _ in range(2)]) == 2
    process.send_signal(signal.SIGTERM)
    ended = finish(process, timeout_s=40)
    if name == "mpich" and ended.code == 0:
        # Its mpirun ends so now and then, as if the ranks had left by themselves.
        assert ended.err == ""
        return
    assert ended.code == 128 + signal.SIGTERM
    assert ended.err.endswith("fxtrain launch: Stopped by SIGTERM.\n")
