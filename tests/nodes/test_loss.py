"""Machines that lose their processes, network or power in the middle of a run."""

import time

import pytest

from tests._patience import wait_for
from tests.nodes._lab import SCRIPTS

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(150)]
TIMEOUT_S = 6.0


def _training(lab, *words, count=2):
    """A run that goes on until something happens."""
    programs = [
        node.launch(
            *(f"--nodes={count}", "--main-address=n0", *words, SCRIPTS / "train.py"),
            *("--folder", lab.shared / "runs", "--sleep", "0.3", "--rows", "2400"),
            *("--timeout", str(TIMEOUT_S)),
        )
        for node in lab.nodes[:count]
    ]
    programs[0].wait_for("update 6.")
    return programs


def _ends(programs, timeout_s=TIMEOUT_S):
    """All programs tell an error two seconds after the timeout, end soon, and leave nothing."""
    start = time.monotonic()
    for program in programs:
        # The updates before the error take half a second; the rest is for a busy machine.
        program.wait_for("fxtrain launch: Rank", start + timeout_s + 4.5 - time.monotonic())
    for program in programs:
        # The launcher that serves the store lets ranks of other machines ask it for a while.
        assert program.finish(8)
    for program in programs:
        wait_for(lambda node=program.node: not node.left(), timeout_s=3)  # which needs a moment


def test_a_killed_rank_is_named_with_its_machine(lab):
    programs = _training(lab)
    lab.nodes[1].send_signal(programs[1].rank(1), 9)
    _ends(programs, 0.0)
    assert "rank 1 on n1: never joined" in programs[0].text
    # In the same words on both machines, beside what happened to their own ranks.
    why = "was ended by SIGKILL. That was not the kernel's out-of-memory killer"
    assert all(
        f"fxtrain launch: Rank 1 of 2 on node 1 (n1) {why}" in program.text for program in programs
    )
    assert [program.code for program in programs] == [1, 137]


@pytest.mark.parametrize("number", [0, 1])
def test_a_pulled_cable_is_an_error_on_both_sides(lab, number):
    programs = _training(lab)
    lab.nodes[number].cut()
    _ends(programs)
    assert "rank 1 on n1: never joined" in programs[0].text
    assert "The store of this run does not answer" in programs[1].text


@pytest.mark.parametrize("number", [0, 1])
def test_a_machine_without_power_is_an_error_on_the_other(lab, number):
    programs = _training(lab)
    lab.nodes[number].power_off()
    _ends([programs[1 - number]])


def test_a_frozen_machine_is_an_error_on_the_other(lab):
    programs = _training(lab)
    lab.nodes[1].freeze()
    _ends(programs[:1])
