"""Replicas that are launched programs, of which one is killed and started again."""

import json
import os
import re
import signal
import subprocess
import time

import pytest

import fxtrain as fx
from tests._patience import patience, wait_for
from tests.launched._run import FXTRAIN, PYTHON, ROOT, SCRIPTS

UPDATES = 10_000  # more than are made
PAUSE_S = "0.1"


class _Replica:
    """A program that trains one replica, with its output in a file."""

    def __init__(self, path, name, lighthouse, strategy, ranks, folder, *more):
        self.out = path / name
        alone = (*PYTHON,) if ranks == 1 else (*FXTRAIN, "launch", f"--ranks={ranks}")
        script = str(SCRIPTS / "replicas.py")
        words = (script, lighthouse, "2", str(UPDATES), PAUSE_S, strategy, str(folder), *more)
        variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RUST_LOG": "error"}
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                (*alone, *words),
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            )

    def lines(self, key):
        """What it has printed so far, of one kind."""
        pieces = [
            line[line.index("{") :] for line in self.out.read_text().splitlines() if "{" in line
        ]
        lines = [json.loads(one) for one in pieces if one.endswith("}") and one.startswith('{"')]
        return [line for line in lines if key in line]

    def wait_for(self, condition):
        """Wait until some update is as asked."""

        def found():
            lines = [line for line in self.lines("update") if condition(line)]
            assert lines or self.process.poll() is None, self.out.read_text()
            return lines

        return wait_for(found, timeout_s=100)[0]

    def end(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_a_replica_is_killed_and_comes_back(lighthouse, tmp_path, strategy, ranks):
    begun = []

    def begin(name):
        begun.append(_Replica(tmp_path, name, lighthouse, strategy, ranks, tmp_path / "run"))
        return begun[-1]

    try:
        first, second = begin("first"), begin("second")
        both = first.wait_for(lambda line: line["live"] == 2)
        second.wait_for(lambda line: line["update"] > both["update"])
        rank = next(line for line in second.lines("up") if line["rank"] == ranks - 1)
        os.kill(rank["pid"], signal.SIGKILL)
        killed = time.time()
        left = first.wait_for(lambda line: line["time"] > killed and line["live"] == 1)
        second.end()
        third = begin("third")
        healed = third.wait_for(lambda line: line["healed"])
        assert healed["live"] == 2 and healed["update"] > left["update"]
        last = third.wait_for(lambda line: line["update"] > healed["update"] + 2)["update"]
        first.wait_for(lambda line: line["update"] >= last)
    finally:
        for one in begun:
            one.end()
    survivor = {line["update"]: line for line in first.lines("update")}
    first_update = min(survivor)  # the second may have made some before
    assert list(survivor) == list(range(first_update, first_update + len(survivor)))
    for update, line in survivor.items():  # no row is lost or repeated
        assert line["samples"] == 8 * ranks * update
    for other in (second, third):
        for line in other.lines("update"):
            if line["update"] in survivor:  # else it is newer than the last line of the other
                assert line["digest"] == survivor[line["update"]]["digest"]
    # After each 10 updates, or when a replica was healed past that many and then is replica 0.
    position = fx.checkpoint.verify(fx.latest(tmp_path / "run")).position
    assert position.updates >= 10 and position.samples == 8 * ranks * position.updates


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2)])  # of one rank: test_rounds.py
def test_a_replica_is_killed_between_averages_and_comes_back(lighthouse, tmp_path, strategy, ranks):
    begun = []

    def begin(name):
        run = tmp_path / "run"
        begun.append(_Replica(tmp_path, name, lighthouse, strategy, ranks, run, "5"))
        return begun[-1]

    try:
        first, second = begin("first"), begin("second")
        first.wait_for(lambda line: line["live"] == 2)
        both = second.wait_for(lambda line: line["live"] == 2 and line["averaged"])
        second.wait_for(lambda line: line["update"] > both["update"])
        rank = next(line for line in second.lines("up") if line["rank"] == ranks - 1)
        os.kill(rank["pid"], signal.SIGKILL)
        left = first.wait_for(lambda line: line["lost"])
        second.end()
        third = begin("third")
        healed = third.wait_for(lambda line: line["healed"])
        assert healed["update"] > left["update"]
        later = third.wait_for(lambda line: line["averaged"] and line["update"] > healed["update"])
        last = later["update"]
        first.wait_for(lambda line: line["update"] >= last)
    finally:
        for one in begun:
            one.end()
    survivor = {line["update"]: line for line in first.lines("update")}
    averages = 0
    for other in (second, third):
        for line in other.lines("update"):
            if line["averaged"] and line["update"] in survivor:
                averages += 1
                assert line["digest"] == survivor[line["update"]]["digest"]
    assert averages  # whichever of the first two began later has no line where it was healed
    for update, line in survivor.items():
        assert line["samples"] == 8 * ranks * update
        if not line["averaged"]:  # each trains on its own rows
            assert not line["lost"]
    assert left["live"] == 1 and 0 < left["lost"] <= 4 * ranks * 5
    saved = fx.latest(tmp_path / "run")
    assert saved is not None and fx.checkpoint.verify(saved).position.updates % 5 == 0


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks"), [("fsdp", 2)])  # of one rank: test_rounds.py
def test_a_frozen_replica_is_given_up_and_comes_back(lighthouse, tmp_path, strategy, ranks):
    """One rank of it is stopped, which closes no connection; `timeout_s` is 20 quiet seconds."""
    begun = [
        _Replica(tmp_path, name, lighthouse, strategy, ranks, tmp_path / "run")
        for name in ("first", "second")
    ]
    first, second = begun
    try:
        first.wait_for(lambda line: line["live"] == 2)
        both = second.wait_for(lambda line: line["live"] == 2)
        frozen_rank = next(line for line in second.lines("up") if line["rank"] == 0)
        os.kill(frozen_rank["pid"], signal.SIGSTOP)
        frozen = time.time()
        alone = first.wait_for(lambda line: line["time"] > frozen and line["live"] == 1)
        assert alone["time"] - frozen < 10 * patience()
        # If it froze between two updates, the lighthouse leaves it out before a rank waits for it.
        given_up = "has shown no sign of life for [\\d.]+ s and is given up"
        assert alone["attempts"] == 1 or re.search(given_up, first.out.read_text())
        if ranks == 1:  # the other ranks of a larger one have given it up by now
            os.kill(frozen_rank["pid"], signal.SIGCONT)
            again = first.wait_for(
                lambda line: line["update"] > alone["update"] and line["live"] == 2
            )
            healed = second.wait_for(lambda line: line["update"] >= again["update"])
            first.wait_for(lambda line: line["update"] >= healed["update"])
    finally:
        for one in begun:
            one.end()
    survivor = {line["update"]: line for line in first.lines("update")}
    for line in second.lines("update"):
        if line["update"] in survivor:
            assert line["digest"] == survivor[line["update"]]["digest"]
    for update, line in survivor.items():
        assert line["samples"] == 8 * ranks * update
    assert both["update"] in survivor
