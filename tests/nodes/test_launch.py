"""Launchers of several machines: they start, stop and end together."""

import re
import time

import pytest

from tests._patience import patience
from tests.nodes._lab import LAUNCH, SCRIPTS

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(150)]


def _launched(lab, *words, count=2, options=()):
    return [
        node.launch(f"--nodes={count}", "--main-address=n0", *options, *words)
        for node in lab.nodes[:count]
    ]


def test_machines_meet(lab):
    programs = _launched(lab, SCRIPTS / "meet.py", count=3, options=("--ranks=2",))
    assert [program.finish() for program in programs] == [0, 0, 0]
    assert all("total 21" in program.text for program in programs)


@pytest.mark.parametrize("number", [0, 1])
def test_a_launcher_that_is_stopped_does_not_keep_the_other_one(lab, number):
    """Its ranks save and stop at the signal, and so do those of the other machine."""
    words = (SCRIPTS / "train.py", "--folder", lab.shared / "runs", "--sleep", "0.3")
    programs = _launched(lab, *words, "--rows", "2400")
    programs[0].wait_for("update 6.")
    start = time.monotonic()
    programs[number].send_signal(15)
    codes = [program.finish(20) for program in programs]
    assert time.monotonic() - start < 15 * patience()
    assert codes[number] == 143 and codes[1 - number] == 0
    assert f"Node {number} (n{number}) was stopped by SIGTERM." in programs[1 - number].text


def test_a_launcher_that_is_killed_does_not_keep_the_other_one(lab):
    programs = _launched(lab, SCRIPTS / "meet.py", "4")
    for number, program in enumerate(programs):
        program.wait_for(f"rank {number} met")
    start = time.monotonic()
    programs[1].send_signal(9)
    assert programs[0].finish(30) == 1
    assert time.monotonic() - start < 25 * patience()
    assert "Node 1 (n1) sent nothing for 10 s" in programs[0].text, programs[0].text


def test_a_node_that_takes_longer_is_waited_for(lab):
    programs = [
        node.launch("--nodes=2", "--main-address=n0", SCRIPTS / "meet.py", str(seconds))
        for node, seconds in zip(lab.nodes, (0, 15), strict=False)
    ]
    assert [program.finish(40) for program in programs] == [0, 0]
    assert "sent nothing" not in programs[0].text


def test_attempts_that_failed_are_told(lab):
    (lab.shared / "once.py").write_text(
        "import os, sys\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':\n"
        "    raise ValueError('only once')\n"
    )
    programs = _launched(lab, lab.shared / "once.py", options=("--restarts=2",))
    assert [program.finish(40) for program in programs] == [0, 0]
    assert (
        "Attempt 1 failed; 2 more to come. Rank 1 of 2 on node 1 (n1) failed: ValueError: only once"
        in (programs[1].text)
    )


def test_versions_that_differ_are_named(lab):
    """As on machines of which one was updated."""
    (lab.shared / "other.py").write_text(
        "import os, fxtrain as fx, fxtrain.ops.rendezvous_store as store\n"
        "store.__version__ = '0.' + os.environ['RANK']\n"
        "fx.detect(device='cpu', timeout_s=20)\n"
    )
    programs = _launched(lab, lab.shared / "other.py")
    assert [program.finish() for program in programs] == [1, 1]
    assert "Rank 0 of 2 has fxtrain 0.0 and torch" in programs[0].text
    assert "but rank 0 has fxtrain 0.0 and torch" in programs[1].text


@pytest.mark.parametrize(("option", "name"), [("--lr", "SGD 0, group 0: lr"), ("--rate", "gamma")])
def test_options_of_optimizers_that_differ_are_named(lab, option, name):
    """A learning rate or a scheduler's factor of one machine, before any update."""
    programs = [
        node.launch(
            *("--nodes=2", "--main-address=n0", SCRIPTS / "train.py"),
            *("--folder", lab.shared / "runs", option, value),
        )
        for node, value in zip(lab.nodes, ("0.5", "0.25"), strict=False)
    ]
    assert [program.finish() for program in programs] == [1, 1]
    for program in programs:
        assert "CollectiveError: wrap: the ranks differ in " in program.text
        mine, other = (re.findall(rf"{name}: {value}", program.text) for value in ("0.5", "0.25"))
        assert len(mine) == len(other) == 1, program.text
        assert "update 1." not in program.text


def test_node_0_on_a_machine_without_the_main_address_is_told(lab):
    """At once; the number or the address is that of another machine."""
    words = ("--node-rank=0", "--nodes=2", "--main-address=n0", SCRIPTS / "meet.py")
    program = lab.nodes[1].start(*LAUNCH, *words)
    assert program.finish(20) == 2
    told = "n0 is not an address of this machine: start node 0 on the machine that has it"
    assert told in program.text
    function = lab.nodes[1].start(SCRIPTS / "function.py", 0, "n0")
    assert function.finish(40) == 1
    assert told in function.text


@pytest.mark.slow
def test_two_nodes_with_number_0_are_told(lab):
    """The one that has the main address serves both."""
    words = ("--node-rank=0", "--nodes=2", "--main-address=n0", "--connect-timeout=7")
    programs = [node.start(*LAUNCH, *words, SCRIPTS / "meet.py") for node in lab.nodes[:2]]
    assert [program.finish() for program in programs] == [2, 2]
    hint = "n0 is not an address of this machine: start node 0 on the machine that has it"
    assert [hint in program.text for program in programs] == [False, True]
    assert "Node 0 of 2 waits for node 1, for up to 7 s." in programs[0].text


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_nodes_that_never_come_are_named_on_all_that_have(lab, rendezvous):
    """By their numbers, if they have some, also on those that would wait for longer."""
    words = ("--nodes=3", "--main-address=n0", f"--rendezvous={rendezvous}", SCRIPTS / "meet.py")
    programs = [
        node.launch(f"--connect-timeout={wait_s}", *words)
        for node, wait_s in zip(lab.nodes, (8, 60), strict=False)
    ]
    assert [program.finish(40) for program in programs] == [2, 2]
    if rendezvous == "static":
        why = "not all nodes joined: node 2 never joined within the 8 s of node 0."
        assert [why in program.text for program in programs] == [True, True]
    else:
        assert "not all nodes joined: 2 of 3 nodes joined within 8 s." in programs[0].text
        assert "not all nodes joined: another launcher waited in vain" in programs[1].text


def test_other_numbers_of_nodes_are_told_on_both(lab):
    programs = [
        node.launch(f"--nodes={count}", "--main-address=n0", SCRIPTS / "meet.py")
        for node, count in zip(lab.nodes, (2, 3), strict=False)
    ]
    assert [program.finish(20) for program in programs] == [2, 2]
    said = "(node 1 on n1 was started for 3 nodes, and node 0 for 2|node 0 on n0 .* 2 .* 1 for 3)"
    assert [bool(re.search(said, program.text)) for program in programs] == [True, True]


@pytest.mark.parametrize("rendezvous", [pytest.param("static", marks=pytest.mark.slow), "c10d"])
def test_a_run_that_ends_well_writes_what_the_script_writes(lab, rendezvous):
    """No warnings of names without reverse DNS, and no C++ frames at the end; torch has both."""
    lab.hosts("none")

    def written(level):
        programs = [
            node.process(
                *(*LAUNCH, f"--node-rank={node.number}", "--nodes=2", f"--rendezvous={rendezvous}"),
                *(f"--main-address={lab.address(0)}", SCRIPTS / "meet.py"),
                env={"TORCH_CPP_LOG_LEVEL": level} if level else {},
            )
            for node in lab.nodes[:2]
        ]
        said = [program.communicate(timeout=60 * patience())[0] for program in programs]
        assert [program.returncode for program in programs] == [0, 0], "\n".join(said)
        return said

    for number, text in enumerate(written("")):
        (line,) = text.splitlines()
        assert line.startswith(f"rank {number} met")
    if rendezvous == "static":  # what is not written above
        told = "".join(written("WARNING"))
        assert "The hostname of the client socket cannot be retrieved" in told
