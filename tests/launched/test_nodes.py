"""Several nodes: launchers of their own on loopback, with real TCP between them."""

import functools
import json
import re
import signal
import socket
import time

import pytest

from fxtrain.testing import free_port
from tests._patience import wait_for
from tests.launched._run import FXTRAIN, SCRIPTS, finish, run, start, start_fork

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
RANKS = str(SCRIPTS / "ranks.py")


def _node(number, port, *words, nodes=2, wait_s=600, begin=start):
    """Start the launcher of one node with two ranks."""
    return begin(
        *FXTRAIN, "launch", "--cpu", "--ranks=2", f"--nodes={nodes}", f"--node-rank={number}",
        "--main-address=127.0.0.1", f"--main-port={port}", "--local-address=127.0.0.1",
        f"--connect-timeout={wait_s}", *words,
    )  # fmt: skip


def _wait_while_running(happened, *programs, timeout_s=120.0):
    """As `wait_for`, with the output of a program that ends first."""

    def seen():
        for program in programs:
            assert program.poll() is None, finish(program)
        return happened()

    wait_for(seen, timeout_s=timeout_s)


def test_two_nodes_meet_though_one_is_late():
    port = free_port()
    late = _node(1, port, RANKS, "meet", "A", begin=start_fork)  # knocks until node 0 is there
    time.sleep(1)
    first = _node(0, port, RANKS, "meet", "A", begin=start_fork)
    ended = [finish(process, timeout_s=60) for process in (first, late)]
    assert [end.code for end in ended] == [0, 0], [end.err for end in ended]
    told = json.loads(ended[0].out)
    assert told["places"] == [[0, 0, 0, 2], [1, 1, 0, 2], [2, 0, 1, 2], [3, 1, 1, 2]]
    assert told["total"] == 10.0
    assert told["launcher"] == "torchrun"


def _said(err):
    """Lines but those of torch's C++ log, which says what it met where it was slow."""
    return [line for line in err.splitlines() if not re.match(r"\[[EWI]\d{4} ", line)]


def test_a_wrong_port_tells_what_was_tried_and_for_how_long():
    wrong, port = free_port(), free_port()
    first = _node(0, port, RANKS, "meet", "A", wait_s=9)
    other = _node(1, wrong, RANKS, "meet", "A", wait_s=4)
    lost = finish(other, timeout_s=60)
    assert lost.code == 2
    (said,) = _said(lost.err)
    assert said.startswith(
        "fxtrain launch: LaunchError: Node 1 of 2 could not reach the main address "
        f"127.0.0.1:{wrong} (attempts: "
    )
    assert "connection refused" in said
    alone = finish(first, timeout_s=60)
    assert alone.code == 2
    waits, said = _said(alone.err)
    assert waits == "fxtrain launch: Node 0 of 2 waits for node 1, for up to 9 s."
    assert "Node 0 of 2 waited " in said
    assert f"at 127.0.0.1:{port}, but not all nodes joined" in said


def test_an_occupied_port_is_told_at_once():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = finish(_node(0, port, RANKS, "meet", "A"), timeout_s=60)
    assert ended.code == 2
    assert f"LaunchError: Port {port} of this machine is in use by another program" in ended.err
    assert ended.err.count("\n") == 1


def test_an_unknown_host_is_named():
    ended = run(
        *FXTRAIN, "launch", "--ranks=1", "--nodes=2", "--node-rank=1",
        "--main-address=no-such-host.invalid", "--connect-timeout=1", RANKS, "meet", "A",
    )  # fmt: skip
    assert ended.code == 2
    assert "the name no-such-host.invalid could not be resolved" in ended.err


@pytest.mark.timeout(300)
def test_a_node_that_was_killed_is_started_again(tmp_path):
    port = free_port()
    words = (
        "--rendezvous=c10d", "--restarts=3", "--run-id=again", "--threads=1",
        # Ten seconds: on a busy machine, a node that lives may miss the heartbeats of two.
        "--rendezvous-option=keep_alive_interval=1",
        "--rendezvous-option=keep_alive_max_attempt=10",
        RANKS, "come_back", str(tmp_path),
    )  # fmt: skip
    stays = _node(0, port, *words, wait_s=600, begin=start_fork)
    wait_for(lambda: _listens(port))  # so it serves the meeting place
    goes = _node(0, port, *words, wait_s=600)
    _wait_while_running(lambda: len(list(tmp_path.glob("here*"))) == 4, stays, goes)
    (tmp_path / "killed").touch()
    goes.send_signal(signal.SIGKILL)
    finish(goes, timeout_s=30)
    again = _node(0, port, *words, wait_s=600, begin=start_fork)
    ended = [finish(process, timeout_s=200) for process in (stays, again)]
    assert [end.code for end in ended] == [0, 0], [end.err for end in ended]
    said = sorted(line for end in ended for line in end.out.splitlines())
    assert said == ["back 0", "back 1", "back 2", "back 3"]


def test_two_launchers_of_one_number_are_one_error():
    port = free_port()
    words = ("--run-id=same", RANKS, "meet", "A")
    first = _node(0, port, *words, begin=start_fork)
    wait_for(lambda: _listens(port))
    second = finish(_node(0, port, *words, begin=start_fork))
    assert second.code == 2
    (said,) = _said(second.err)
    assert f"LaunchError: Port {port} of this machine is in use by another program" in said
    first.send_signal(signal.SIGTERM)
    finish(first)


@pytest.mark.timeout(300)
def test_a_launcher_of_a_run_that_has_its_nodes_says_that_it_stands_by(tmp_path):
    port = free_port()
    words = ("--rendezvous=c10d", "--run-id=same", "--threads=1", RANKS, "come_back", str(tmp_path))
    programs = [_node(0, port, *words, begin=start_fork)]
    wait_for(lambda: _listens(port))
    programs.append(_node(0, port, *words, begin=start_fork))
    _wait_while_running(lambda: len(list(tmp_path.glob("here*"))) == 4, *programs)
    third = _node(0, port, *words)
    assert third.stderr.readline() == (
        f"fxtrain launch: Run 'same' at 127.0.0.1:{port} has its 2 nodes. This launcher stands by, "
        f"to take the place of one that leaves. If it belongs to another run, end it, and choose "
        f"another main_port for it.\n"
    )
    for program in (third, *programs):
        program.send_signal(signal.SIGTERM)
    for program in (third, *programs):  # one ends by itself once the other one has gone
        finish(program)


def _with_a_bad_node(folder, min_nodes, *, reserve=False):
    """How launchers end of which the second has ranks that fail each time; the second last."""
    port = free_port()
    words = (
        "--rendezvous=c10d", f"--min-nodes={min_nodes}", "--restarts=3", "--threads=1",
        "--rendezvous-option=last_call_timeout=2", RANKS, "bad_node",
    )  # fmt: skip
    programs = [_node(0, port, *words, begin=start_fork)]
    _wait_while_running(lambda: _listens(port), *programs)
    env = {"BAD": str(folder / "begun")}
    bad = _node(0, port, *words, begin=functools.partial(start_fork, env=env))
    if reserve:
        _wait_while_running((folder / "begun").exists, *programs, bad)
        programs.append(_node(0, port, *words, begin=start_fork))
    return [finish(process, timeout_s=120) for process in (*programs, bad)]


_LEFT = "leaves the run: its ranks failed 2 times in a row, and enough other nodes remain."


@pytest.mark.timeout(300)
def test_a_node_whose_ranks_fail_twice_in_a_row_leaves_the_run(tmp_path):
    stays, bad = _with_a_bad_node(tmp_path, 1)
    assert (stays.code, bad.code) == (0, 1), stays.err
    assert _LEFT in bad.err and "a broken device" in bad.err
    assert sorted(stays.out.splitlines()) == ["done 0 of 2", "done 1 of 2"]
    assert "The run continues with 1 of 2 nodes." in stays.err


@pytest.mark.timeout(300)
def test_a_node_in_reserve_takes_the_place_of_one_whose_ranks_fail(tmp_path):
    """At the latest once its ranks have failed twice: torch may give its place away before.

    It is then itself in reserve, until the run has succeeded without it.
    """
    stays, replaces, bad = _with_a_bad_node(tmp_path, 2, reserve=True)
    assert (stays.code, replaces.code) == (0, 0), (stays.err, replaces.err)
    assert "a broken device" in bad.err and bad.code == (_LEFT in bad.err), bad.err
    done = sorted((stays.out + replaces.out).splitlines())
    assert done == [f"done {rank} of 4" for rank in range(4)]


@pytest.mark.timeout(300)
def test_a_node_stays_if_too_few_others_would_remain(tmp_path):
    stays, bad = _with_a_bad_node(tmp_path, 2)
    assert (stays.code, bad.code) == (1, 1)
    assert "leaves the run" not in bad.err and "Attempt 3 failed; 1 more to come." in bad.err


def _listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
