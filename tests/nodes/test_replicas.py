"""Replicas on two machines, of which one freezes or loses its network."""

import json
import time

import pytest

from tests._patience import patience, wait_for
from tests.launched._run import SCRIPTS

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(180)]

LIGHTHOUSE = """
import time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="0.0.0.0:29510", min_replicas=1, join_timeout_ms=20_000,
                          quorum_tick_ms=20, heartbeat_timeout_ms=1000)
time.sleep(600)
"""
NOTICED_S = 10.0  # on a busy machine; `timeout_s` of these replicas is 20 s


@pytest.fixture
def lighthouse(lab):
    pytest.importorskip("torchft", reason="torchft is not installed")
    script = lab.shared / "lighthouse.py"
    script.write_text(LIGHTHOUSE)
    lab.nodes[2].start(script, env={"RUST_LOG": "error"})
    return "http://n2:29510"


def _updates(program):
    lines = [line for line in program.text.splitlines() if line.startswith('{"time"')]
    return [json.loads(line) for line in lines if line.endswith("}")]


def _wait_for(program, condition):
    def found():
        lines = [line for line in _updates(program) if condition(line)]
        assert lines or program.code is None, program.text
        return lines

    return wait_for(found, timeout_s=90)[0]


@pytest.mark.parametrize("event", ["freezes", "loses its network"])
def test_a_replica_that_stops_answering_is_given_up_and_comes_back(lab, lighthouse, event):
    first, second = (
        node.start(SCRIPTS / "replicas.py", lighthouse, "2", "100000", "0.1", "single", "run")
        for node in lab.nodes[:2]
    )
    _wait_for(first, lambda line: line["live"] == 2)
    _wait_for(second, lambda line: line["live"] == 2)
    lost = lab.nodes[1]
    lost.freeze() if event == "freezes" else lost.cut()
    at = time.time()
    alone = _wait_for(first, lambda line: line["time"] > at and line["live"] == 1)
    assert alone["time"] - at < NOTICED_S * patience()
    lost.thaw() if event == "freezes" else lost.link("up")
    both = _wait_for(first, lambda line: line["time"] > alone["time"] and line["live"] == 2)
    _wait_for(second, lambda line: line["update"] >= both["update"])
    mine, theirs = ({line["update"]: line for line in _updates(one)} for one in (first, second))
    assert sorted(mine) == list(range(min(mine), max(mine) + 1))
    common = mine.keys() & theirs.keys()
    assert both["update"] in common
    for update in common:
        assert mine[update]["digest"] == theirs[update]["digest"]
    for update, line in mine.items():  # no row is lost or repeated
        assert line["samples"] == 8 * update
