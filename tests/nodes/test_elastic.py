"""Elastic runs over machines: nodes that join, leave and come back."""

import json
import re
import time

import pytest

from tests._patience import patience, wait_for
from tests.nodes._lab import SCRIPTS, later
from tests.nodes._rows import every_row_once

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(200)]
SLOW = pytest.mark.slow
TIMEOUT_S = 6.0


def _start(lab, node, *options, nodes=2, rows=480, sleep=0.3, timeout_s=TIMEOUT_S):
    return lab.nodes[node].launch(
        *("--rendezvous=c10d", f"--nodes={nodes}", "--main-address=n0", "--restarts=3", *options),
        *(SCRIPTS / "train.py", "--folder", lab.shared / "runs", "--sleep", str(sleep)),
        *("--rows", str(rows), "--timeout", str(timeout_s)),
    )


def _training(lab, *options, **settings):
    programs = [_start(lab, node, *options, **settings) for node in (0, 1)]
    programs[0].wait_for("update 6.")
    return programs


def _finish(programs, timeout_s=120):
    codes = [program.finish(timeout_s) for program in programs]
    assert set(codes) == {0}, "\n".join(program.text[-3000:] for program in programs)


def test_ranks_start_again_after_one_was_killed(lab):
    programs = _training(lab, rows=240)
    lab.nodes[1].send_signal(programs[1].rank(1), 9)
    _finish(programs)
    every_row_once(lab, 240)
    told = "Rank 1 of 2 on node 1 (n1) was ended by SIGKILL"
    # Node 0 sees that node 1 waits, or first the error of its own rank.
    assert re.search(rf"(start again\.|more to come\.) {re.escape(told)}", programs[0].text)
    assert f"Attempt 1 failed; 3 more to come. {told}" in programs[1].text


def test_a_launcher_that_stands_by_ends_with_the_run(lab):
    programs = [_start(lab, node, rows=240) for node in (0, 1)]
    programs[0].wait_for("update 1.")
    programs.append(_start(lab, 2, "--node-rank=1", rows=240))
    programs[2].wait_for("stands by")
    _finish(programs)
    every_row_once(lab, 240)


@SLOW
def test_clocks_may_differ_by_minutes(lab):
    """Each machine notices the other's end by its own clock."""
    lab.nodes[0].set_clock(-420)
    lab.nodes[1].set_clock(600)
    programs = _training(lab, rows=1440)
    time.sleep(20)  # longer than torch waits for a heartbeat
    lab.nodes[1].send_signal(programs[1].rank(1), 9)
    _finish(programs)
    every_row_once(lab, 1440)
    first, second = (
        json.loads((node.disk / f"rows-{node.number}.jsonl").read_text().splitlines()[0])["time"]
        for node in lab.nodes[:2]
    )
    assert second - first > 900


@SLOW
def test_the_others_continue_without_a_machine_that_lost_its_power(lab):
    programs = _training(lab, "--min-nodes=1")
    lab.nodes[1].power_off()
    _finish(programs[:1], 150)
    every_row_once(lab, 480)


@SLOW
def test_a_machine_whose_ranks_fail_twice_in_a_row_leaves_the_run(lab):
    programs = _training(lab, "--min-nodes=1", "--rendezvous-option=last_call_timeout=3")
    first = programs[1].rank(1)
    lab.nodes[1].send_signal(first, 9)
    programs[1].wait_for("Attempt 1 failed")
    wait_for(lambda: programs[1].rank(1) != first)
    lab.nodes[1].send_signal(programs[1].rank(1), 9)
    assert programs[1].finish(60) == 137, programs[1].text
    assert "Node 1 (n1) leaves the run: its ranks failed 2 times in a row" in programs[1].text
    _finish(programs[:1])
    assert "The run continues with 1 of 2 nodes." in programs[0].text
    every_row_once(lab, 480)


@SLOW
def test_a_machine_joins_a_run(lab):
    first = _start(lab, 0, "--min-nodes=1", rows=960)
    first.wait_for("update 6.", 90)
    second = _start(lab, 1, "--min-nodes=1", rows=960)
    second.wait_for("rank 1 ready", 90)
    _finish([first, second], 150)
    every_row_once(lab, 960)


@SLOW
def test_a_machine_comes_back(lab):
    programs = _training(lab, "--min-nodes=2", rows=960)
    lab.nodes[1].kill_all()
    programs[0].wait_for("Waiting for node 1 (10.91.7.11) of the attempt before")
    again = _start(lab, 1, "--min-nodes=2", rows=960)
    _finish([programs[0], again], 150)
    every_row_once(lab, 960)
    assert programs[0].text.count("of the attempt before") == 1


def test_a_launcher_that_was_killed_comes_back(lab):
    """Its ranks are told to end, and save and stop on both machines, where nothing has failed."""
    options = [f"--rendezvous-option=keep_alive_{one}" for one in ("interval=1", "max_attempt=3")]
    programs = _training(lab, *options, rows=960)
    programs[1].send_signal(9)
    again = _start(lab, 1, *options, rows=960)
    _finish([programs[0], again], 150)
    every_row_once(lab, 960)
    assert "The ranks of this node start again. Nodes join or leave." in programs[0].text


@SLOW
def test_nodes_that_have_not_joined_are_counted(lab):
    first = _start(lab, 0, "--connect-timeout=9")
    first.wait_for("1 of 2 nodes have joined; waiting for the others for up to 9 s.")
    assert first.finish(40) == 2


@SLOW
def test_a_network_that_parts_for_longer_than_the_timeout_costs_a_restart(lab):
    """The launcher that asked in vain for 5 s waits once more before its ranks restart.

    TCP asks 3 s and 6.2 s after the first packet that was lost.
    """
    programs = _training(lab, rows=960, timeout_s=3.0)
    lab.split(1)
    later(5, lab.heal)
    _finish(programs, 150)
    every_row_once(lab, 960)


@pytest.mark.parametrize(
    "lost", ["processes", pytest.param("power", marks=SLOW), pytest.param("cable", marks=SLOW)]
)
def test_the_machine_that_serves_the_rendezvous_is_lost(lab, lost):
    programs = _training(lab)
    start = time.monotonic()
    {
        "processes": lab.nodes[0].kill_all,
        "power": lab.nodes[0].power_off,
        "cable": lab.nodes[0].cut,
    }[lost]()
    assert programs[1].finish(60) == 2, programs[1].text
    assert time.monotonic() - start < TIMEOUT_S + 10 * patience()
    assert "The rendezvous at n0:29500 was lost during the run" in programs[1].text
    assert "Exception raised from" not in programs[1].text
    assert "all nodes joined" not in programs[1].text


@pytest.mark.parametrize("secret", ["", pytest.param("0123456789abcdef" * 4, marks=SLOW)])
def test_a_stranger_that_deletes_keys_is_told(lab, secret):
    """It ends the run, within the time limit and with its name."""
    variables = {"FXTRAIN_RUN_SECRET": secret} if secret else {}
    lab.variables_of_run |= variables
    programs = _training(lab, "--shutdown=5", rows=9600)
    stranger = lab.nodes[2].start(SCRIPTS / "stranger.py", "n0")
    assert stranger.finish(30) == 0, stranger.text
    start = time.monotonic()
    codes = [program.finish(40) for program in programs]
    assert time.monotonic() - start < TIMEOUT_S + 10 * patience(), [
        program.text for program in programs
    ]
    # The launcher that notices it first stops its ranks, and so those of the other one.
    assert set(codes) <= {1, 2} and 2 in codes, [program.text for program in programs]
    for program in programs:
        assert "the rendezvous state was deleted: another program" in program.text, program.text
