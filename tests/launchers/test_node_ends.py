"""What the nodes of a launch tell each other at their end."""

import json
import signal
import subprocess
import sys
import threading
import time
from itertools import permutations
from types import SimpleNamespace

import attrs
import pytest
import torch
from torch import distributed as dist

from fxtrain.errors import LaunchError
from fxtrain.launchers import LaunchSpec
from fxtrain.launchers.built_in.native import agent as agents
from fxtrain.launchers.built_in.native.agent import NodeEnd, NodeEnds, _Agent
from fxtrain.launchers.built_in.native.elastic import check_devices
from fxtrain.launchers.built_in.native.rendezvous import ElasticRendezvous
from fxtrain.launchers.outcome import Failure, LaunchResult, describe, find_failures


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Nodes wait for what others tell, however slow this machine is."""
    monkeypatch.setattr(agents, "_REPORT_S", 60.0)


def _nodes(count, store=None):
    store = store or dist.HashStore()
    return [NodeEnds(store, node, count, node == 0) for node in range(count)]


def _together(actions):
    """The results of functions that run beside each other."""
    found = {}
    threads = [
        threading.Thread(target=lambda n=n, act=act: found.update({n: act()}))
        for n, act in enumerate(actions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[n] for n in range(len(actions))]


def _end(node, distance=0):
    return NodeEnd(text=f"Rank {node} failed", distance=distance)


@pytest.mark.parametrize("distances", [(0, 1, 1), (0, 0, 1), (0, 0, 0), (2, 0, 1)])
def test_all_nodes_name_the_same_culprit(distances):
    for order in {*permutations(distances)}:
        nodes = _nodes(3)
        said = _together(
            [
                lambda node=node, far=far: node.culprit_of(_end(node.node, far))
                for node, far in zip(nodes, order, strict=True)
            ]
        )
        names = {text or f"Rank {node} failed" for node, text in enumerate(said)}
        assert len(names) == 1, (order, said)
        (name,) = names
        assert order[int(name.split()[1])] == 0


def test_a_node_waits_for_an_earlier_cause_that_is_still_written():
    early, lost, late = _nodes(3)
    number = early.store.add("ends", 1)
    assert late.report(_end(2)).number == number + 1
    written = json.dumps(attrs.asdict(attrs.evolve(_end(0), number=number)))

    def write():
        while lost.store.add("ends", 0) < 3:  # until the other node has reported its end
            time.sleep(0.01)
        early.store.set("ended/0", written)

    assert _together([lambda: lost.culprit_of(_end(1, 1)), write])[0] == "Rank 0 failed"


def test_errors_that_only_name_a_peer_are_nobody_elses_culprit():
    nodes = _nodes(2)
    assert _together([lambda n=n: n.culprit_of(_end(n.node, 1)) for n in nodes]) == ["", ""]


def test_the_first_of_two_errors_counts():
    first, second = _nodes(2)
    assert first.culprit_of(_end(0)) == ""
    assert second.culprit_of(_end(1)) == "Rank 0 failed"


def test_a_failure_elsewhere_is_what_a_success_ends_with():
    nodes = _nodes(3)
    ends = [nodes[0].wait, nodes[1].wait, lambda: nodes[2].culprit_of(_end(2))]
    assert _together(ends) == ["Rank 2 failed", "Rank 2 failed", ""]


def test_nodes_that_all_succeed_leave_together(capsys):
    def stay():
        time.sleep(0.5)
        return nodes[1].wait()

    nodes = _nodes(2)
    assert _together([nodes[0].wait, stay]) == ["", ""]
    assert capsys.readouterr().err == ""


def test_a_node_that_was_stopped_is_told_and_no_failure(capsys):
    first, second = _nodes(2)
    second.report(NodeEnd(text="Node 1 was stopped by SIGTERM.", stopped=True))
    assert first.wait() == ""
    assert capsys.readouterr().err == "fxtrain launch: Node 1 was stopped by SIGTERM.\n"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"text": 1, "distance": "x"}', "\x00"])
def test_what_a_stranger_writes_is_a_failure(text):
    first, second = _nodes(2)
    first.store.set("ended/1", text)
    assert "Node 1 reported its end in another format" in first.wait()
    assert second.node == 1


def test_a_store_that_ended_is_no_answer():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    node = NodeEnds(client, 1, 2, serves=False)
    assert node.reported() == ""
    del server
    assert node.wait() is None
    assert node.culprit_of(_end(1)) is None


def test_a_node_alone_waits_for_nobody():
    (node,) = _nodes(1)
    node.begin()
    assert node.culprit_of(_end(0)) == "" and node.reported() == "" and not node.interrupted()
    assert node.wait() == "" and node.name == ""
    node.leave()


def _agent(*, failures=2, count=2, least=1, reserve=0, serves=False, elastic=True):
    agent = _Agent.__new__(_Agent)
    agent.launch = LaunchSpec(
        target="train.py", nodes=9, min_nodes=least, rendezvous="c10d" if elastic else "static"
    )
    agent.serves, agent._in_a_row = serves, failures
    agent._ends = SimpleNamespace(count=count)
    handler = ElasticRendezvous.__new__(ElasticRendezvous)
    state = SimpleNamespace(wait_list=set(range(reserve)), redundancy_list={"last"})
    handler._backend = SimpleNamespace(seen=state if reserve else None)
    agent.handler = handler
    return agent


@pytest.mark.parametrize(
    ("settings", "leaves"),
    [
        ({}, True),
        ({"failures": 1}, False),
        ({"least": 2}, False),
        ({"least": 2, "reserve": 1}, True),
        ({"least": 4, "reserve": 1}, False),
        ({"serves": True}, False),
        ({"elastic": False}, False),
        ({"count": 1}, False),
    ],
)
def test_a_node_leaves_if_its_ranks_failed_twice_and_enough_others_remain(settings, leaves):
    assert _agent(**settings)._can_leave() is leaves


@pytest.mark.parametrize(
    ("end", "reserve", "again"),
    [
        (NodeEnd(text="Node 1 was stopped by SIGTERM.", stopped=True), 1, True),
        (NodeEnd(text="Node 1 was stopped by SIGTERM.", stopped=True), 0, False),
        (NodeEnd(text="Rank 1 failed"), 1, True),
        (NodeEnd(), 1, False),  # the run has succeeded
    ],
)
def test_ranks_that_ended_well_start_again_if_a_node_in_reserve_replaces_another(
    end, reserve, again
):
    """They may have saved and stopped only since those of the other node did."""
    agent, closed = _agent(), []
    agent._ends, other = _nodes(2)
    agent.handler = SimpleNamespace(
        num_nodes_waiting=lambda: 0,
        nodes_in_reserve=lambda: reserve,
        noticed_s=20,
        is_closed=lambda: bool(closed),
    )
    other.report(end)
    assert [agent._starts_again(), agent._starts_again()] == [again, again]
    closed.append(True)
    assert not agent._starts_again()


def test_ranks_that_ended_well_start_again_with_those_of_another_node_that_fail_later():
    agent, fails = _agent(), _agent()
    agent._ends, fails._ends = _nodes(2)
    ended = LaunchResult(ranks=4, failures=(Failure(rank=1, code=3),), node="node 1")
    fails._ended, fails._failures, fails._remaining_restarts = lambda _: ended, {}, 1
    agent.handler = fails.handler = SimpleNamespace(
        num_nodes_waiting=lambda: 0, nodes_in_reserve=lambda: 0, noticed_s=20, is_closed=bool
    )
    assert _together([agent._starts_again, fails._count_failure])[0]


class _Rank:
    """A process that runs until it has been looked at so often, and then writes why it failed."""

    def __init__(self, path, looks, code, kind):
        self.path, self.looks, self.code, self.kind, self.killed = path, looks, code, kind, False

    def poll(self):
        self.looks -= 1
        if self.looks > 0:
            return None
        if not self.killed and self.kind:
            text = {"message": "why", "extraInfo": {"rank": int(self.path.stem), "kind": self.kind}}
            self.path.write_text(json.dumps({"message": text}))
        return self.code


def _failing(folder, *processes):
    """An agent after it has looked at ranks of this node; how long it gave those that ran."""
    ranks = [_Rank(folder / f"{rank}.json", *one) for rank, one in enumerate(processes)]
    given = []

    def close(timeout):
        given.append(timeout)
        for rank in ranks:
            if rank.looks > 0:
                rank.looks, rank.killed, rank.code = 0, True, -signal.SIGKILL

    agent = _agent()
    agent._pcontext = SimpleNamespace(
        subprocess_handlers={n: SimpleNamespace(proc=rank) for n, rank in enumerate(ranks)},
        error_files={n: str(rank.path) for n, rank in enumerate(ranks)},
        close=close,
    )
    workers = [SimpleNamespace(global_rank=n, local_rank=n) for n in range(len(ranks))]
    agent._end_after_failure(SimpleNamespace(workers=workers))
    codes = {n: rank.poll() for n, rank in enumerate(ranks)}
    paths = [rank.path for rank in ranks if rank.path.exists()]
    return agent, find_failures(codes, paths, stopped=agent._stopped), given


LOST, OWN = "fxtrain.errors.CollectiveError", "ValueError"


def test_ranks_that_run_are_left_alone(tmp_path):
    assert _failing(tmp_path, (9, 1, OWN), (0, 0, ""))[2] == []


@pytest.mark.parametrize(("code", "kind"), [(1, OWN), (3, ""), (-9, "")])
def test_the_cause_comes_first_though_a_peer_ends_before_it(code, kind, tmp_path, monkeypatch):
    """The peer of a rank that fails may be told of it, and end, before the rank itself does."""
    monkeypatch.setattr(agents, "_CAUSE_S", 600.0)
    _, failures, given = _failing(tmp_path, (0, 1, LOST), (3, code, kind), (99, 1, OWN))
    assert [failure.rank for failure in failures] == [1, 0, 2]
    assert [failure.stopped for failure in failures] == [False, False, True]
    assert given == [10]  # as `shutdown_s` has it


def test_a_rank_that_hangs_is_no_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "_CAUSE_S", 0.0)
    agent, failures, _ = _failing(tmp_path, (0, 1, LOST), (99, 1, OWN))
    assert agent._stopped == (1,)
    assert [(failure.rank, failure.code) for failure in failures] == [(0, 1), (1, -signal.SIGKILL)]
    assert "so the launcher killed it." in describe(LaunchResult(ranks=2, failures=failures))


@pytest.mark.parametrize("met", [False, True])
def test_a_node_that_waited_in_vain_to_join_leaves_the_run_to_the_others(met):
    agent, closed = _agent(), []
    agent._ends = _nodes(1)[0]
    agent.handler = SimpleNamespace(shutdown=lambda: closed.append(True))
    agent.joined = int(met)
    agent._leave(None, True)
    assert bool(closed) is met


@pytest.mark.parametrize(
    ("there", "fields", "says"),
    [
        (2, {"ranks": 3}, "3 ranks were requested, but this machine has 2 cuda devices"),
        (1, {"gpus": ("0", "7")}, "The GPUs 0,7 were chosen, but only 1 of them are usable"),
    ],
)
def test_ranks_that_do_not_match_the_gpus_of_a_machine(there, fields, says, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: there)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: "cuda")
    with pytest.raises(LaunchError, match=says):
        check_devices(LaunchSpec(target="train.py", **fields))
    check_devices(LaunchSpec(target="train.py", ranks=3, cpu=True))
    check_devices(LaunchSpec(target="train.py", ranks=there))


def test_the_launcher_is_imported_without_torch():
    """It makes torch's C++ code quiet, and checks ports and file names, before torch is loaded."""
    words = "import sys, fxtrain.launchers.built_in.native.elastic; print('torch' in sys.modules)"
    done = subprocess.run(
        (sys.executable, "-c", words),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
