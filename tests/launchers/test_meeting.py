"""The rendezvous of the native launcher: what it reads from the store of a network."""

import argparse
import base64
import json
import os
import pickle
import platform
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import DistStoreError, HashStore, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    dynamic_rendezvous,
)

from fxtrain._secret import SECRET
from fxtrain.launchers import LaunchSpec
from fxtrain.launchers.built_in.native import rendezvous
from fxtrain.launchers.built_in.native.agent import _Agent
from fxtrain.launchers.built_in.native.rendezvous import (
    Clock,
    ElasticRendezvous,
    StateBackend,
    meet,
    open_handler,
    read_state,
    write_state,
)
from fxtrain.launchers.orphans import MARK

KEY = "fxtrain.rendezvous.run"
NODES = st.builds(
    dynamic_rendezvous._NodeDesc, st.text(max_size=9), st.integers(0, 1 << 22), st.integers(0, 9)
)
TIMES = st.datetimes(timezones=st.just(UTC))


class _Harm:
    """Runs code where it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@st.composite
def _states(draw):
    state = dynamic_rendezvous._RendezvousState()
    state.round = draw(st.integers(0, 1 << 40))
    state.complete, state.closed = draw(st.booleans()), draw(st.booleans())
    state.deadline = draw(st.none() | TIMES)
    state.participants = draw(st.dictionaries(NODES, st.integers(0, 99)))
    state.wait_list, state.redundancy_list = draw(st.sets(NODES)), draw(st.sets(NODES))
    state.last_heartbeats = draw(st.dictionaries(NODES, TIMES))
    return state


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ({0: (2, 20), 1: (3, 20)}, "was started for . nodes, and node . for [23]"),
        ({0: (3, 20), 1: (3, 20), 2: (2, 20)}, "was started for . nodes, and node . for [23]"),
        ({0: (4, 1), 1: (4, 20), 3: (4, 20)}, "node 2 never came within the 1 s of node 0"),
        ({0: (3, 20), 2: (3, 1)}, "node 1 never came within the 1 s of node 2"),
    ],
)
def test_all_nodes_learn_why_they_did_not_meet_before_the_store_ends(nodes, why):
    """By their number of nodes, and how long they wait."""
    said = {}
    serves = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = {0: serves}
    for node in [*nodes][1:]:
        stores[node] = TCPStore("127.0.0.1", serves.port, is_master=False)
    del serves

    def join(node, count, wait_s):
        try:
            meet(stores[node], node, count, wait_s)
        except RendezvousStateError as error:
            said[node] = str(error)
        stores[node] = None  # as where a process ends

    threads = [threading.Thread(target=join, args=(node, *how)) for node, how in nodes.items()]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(30)
    assert said.keys() == nodes.keys()
    assert len({*said.values()}) == 1 and re.search(why, said[0])


def test_all_nodes_are_told_of_a_node_with_another_secret(monkeypatch):
    """At once, not once they have waited for it in vain."""

    def handler(node, secret, door=None):
        monkeypatch.setenv(SECRET, secret)
        launch = LaunchSpec(target="train.py", nodes=3, node_rank=node, main_port=port)
        config = argparse.Namespace(run_id="run", rdzv_endpoint=f"127.0.0.1:{port}")
        return open_handler(launch, config, door)

    with socket.create_server(("127.0.0.1", 0)) as door, ThreadPoolExecutor() as pool:
        port = door.getsockname()[1]
        nodes = [handler(0, "a" * 16, door), handler(1, "a" * 16)]
        waits = [pool.submit(node.next_rendezvous) for node in nodes]
        with pytest.raises(RendezvousStateError, match="on this node differs"):
            handler(2, "b" * 16)
        for wait in waits:
            with pytest.raises(RendezvousStateError, match=f"{platform.node()} differs from that"):
                wait.result(20)


@pytest.fixture
def run(monkeypatch):
    """A run of at most two nodes: `make` one, and `submit` what it does beside the others."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    store, config = HashStore(), argparse.Namespace()

    def make(least=2, **options):
        config.rdzv_configs = {"join_timeout": "20", "last_call_timeout": "1", **options}
        config.run_id, config.rdzv_endpoint = "run", "127.0.0.1:1"
        config.min_nodes, config.max_nodes, config.local_addr = least, 2, "127.0.0.1"
        return ElasticRendezvous(store, config)

    with ThreadPoolExecutor() as pool:
        yield argparse.Namespace(make=make, submit=pool.submit, store=store)
        ElasticRendezvous(store, config).shutdown()  # so that none waits for another one


def test_nodes_that_run_do_not_start_again_for_a_node_without_a_place(run):
    """Such as one that waited while others started again, of which one was quicker."""
    first, quick, third = (run.make() for _ in range(3))
    look = StateBackend(run.store, "run", 3)  # sees a wait list as it is stored

    def listed(names, count):
        lists = lambda: [len(getattr(look.seen, f"{name}_list")) for name in names]  # noqa: E731
        _wait_for(lambda: look.get_state() and sum(lists()) == count)

    run.submit(first.next_rendezvous)
    quick.next_rendezvous()
    others = [run.submit(third.next_rendezvous)]
    listed(["redundancy"], 1)
    others.append(run.submit(first.next_rendezvous))
    listed(["wait"], 2)
    quick.next_rendezvous()  # the others look once in a second, and one of them joins
    listed(["wait", "redundancy"], 1)
    assert quick.num_nodes_waiting() == 0 and quick.nodes_in_reserve() == 1
    quick.shutdown()
    ends = [other.exception(20) for other in others]
    assert [type(end) for end in ends if end] == [RendezvousGracefulExitError]


def test_a_launcher_for_another_number_of_nodes_is_refused(run):
    run.make(1)
    with pytest.raises(RendezvousStateError, match="for 2 nodes, and the first one for 1 to 2"):
        run.make(2)
    run.make(1)


def test_a_node_that_leaves_gives_its_place_away_before_its_heartbeats_are_missed(run):
    stays, leaves, reserve = (run.make() for _ in range(3))
    run.submit(stays.next_rendezvous)
    leaves.next_rendezvous()
    waits = run.submit(reserve.next_rendezvous)
    _wait_for(lambda: stays.num_nodes_waiting() == 0 and stays.nodes_in_reserve() == 1)
    start = time.monotonic()
    leaves.leave()
    _wait_for(lambda: stays.num_nodes_waiting() == 1)
    assert time.monotonic() - start < 10
    assert {stays.next_rendezvous().rank, waits.result(20).rank} == {0, 1}


@pytest.mark.parametrize("node", [0, 1])
def test_nodes_join_again_without_one_that_is_lost_once_it_has_joined(
    node, run, monkeypatch, tmp_path, capsys
):
    """Before the others know its ranks, for which they would wait until they end the run."""
    monkeypatch.setenv(MARK, "none")
    beats = {"keep_alive_interval": "1", "keep_alive_max_attempt": "4"}
    handlers = [run.make(1, **beats) for _ in range(2)]  # torch numbers nodes in this order
    run.store.set_timeout(timedelta(seconds=3))  # not 9 s
    lost, stays = handlers.pop(node), *handlers
    spec = WorkerSpec("default", 1, stays, entrypoint="none", local_addr="127.0.0.1")
    agent = _Agent(spec, DefaultLogsSpecs(str(tmp_path)))
    agent.launch, agent.serves = LaunchSpec(target="train.py", nodes=2, rendezvous="c10d"), True
    meets = run.submit(agent._rendezvous, agent._worker_group)
    with suppress(DistStoreError):  # which waits for what the other one writes
        lost.next_rendezvous()
    lost._handler._stop_heartbeats()
    meets.result(30)
    assert agent._worker_group.group_world_size == 1
    assert "A node that had joined was lost before its ranks started." in capsys.readouterr().err


def _wait_for(happened):
    end = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < end, "It did not happen in time."
        time.sleep(0.01)


@given(state=_states())
def test_a_state_travels_as_json(state):
    clock = Clock()
    assert vars(read_state(write_state(state, clock), clock, 30)) == vars(state)


def _got(answer):
    assert answer is not None
    return answer


def test_a_backend_gives_back_what_was_set():
    store = HashStore()
    first, second = StateBackend(store, "run", 2), StateBackend(store, "run", 2)
    assert first.get_state() is None
    state = dynamic_rendezvous._RendezvousState()
    state.last_heartbeats[dynamic_rendezvous._NodeDesc("n0", 1, 0)] = datetime.now(UTC)
    data, token, was_set = _got(first.set_state(pickle.dumps(state)))
    assert was_set and vars(pickle.loads(data)) == vars(state)
    seen, same = _got(second.get_state())
    assert same == token
    state = pickle.loads(seen)
    state.round = 4
    assert second.set_state(pickle.dumps(state), "outdated") == (seen, token, False)
    assert second.set_state(pickle.dumps(state), None) == (seen, token, False)
    changed, _, was_set = _got(second.set_state(pickle.dumps(state), token))
    assert was_set and pickle.loads(changed).round == 4


def test_clocks_may_differ():
    """A heartbeat is as old as the reader knows it, and is written back as its writer wrote it."""
    store = HashStore()
    first, second = StateBackend(store, "run", 2), StateBackend(store, "run", 2)
    fast, slow = (dynamic_rendezvous._NodeDesc(f"n{n}", 1, 0) for n in (0, 1))
    state = dynamic_rendezvous._RendezvousState()
    state.last_heartbeats[fast] = datetime.now(UTC) + timedelta(minutes=7)
    state.deadline = state.last_heartbeats[fast] + timedelta(seconds=30)
    first.set_state(pickle.dumps(state))
    before = store.get(KEY)
    found, token = _got(second.get_state())
    state = pickle.loads(found)
    assert abs(state.last_heartbeats[fast] - datetime.now(UTC)) < timedelta(seconds=10)
    assert abs(state.deadline - datetime.now(UTC)) < timedelta(seconds=40)
    state.last_heartbeats[slow] = datetime.now(UTC)
    second.set_state(pickle.dumps(state), token)
    after = json.loads(store.get(KEY))
    assert after["last_heartbeats"][0] == json.loads(before)["last_heartbeats"][0]
    assert after["deadline"] == json.loads(before)["deadline"]
    assert [*pickle.loads(_got(first.get_state())[0]).last_heartbeats] == [fast, slow]


def test_a_heartbeat_is_sent_again_if_another_node_wrote_first():
    """Both know what was stored a second ago, so nodes that joined together meet here each time."""
    store = HashStore()
    first, second = StateBackend(store, "run", 2), StateBackend(store, "run", 2)
    ours, theirs = (dynamic_rendezvous._NodeDesc(f"n{n}", 1, 0) for n in (0, 1))
    state = dynamic_rendezvous._RendezvousState()
    before = datetime.now(UTC) - timedelta(seconds=9)
    state.last_heartbeats = {ours: before, theirs: before}
    token = _got(first.set_state(pickle.dumps(state)))[1]
    state.last_heartbeats[theirs] = datetime.now(UTC)
    _got(second.set_state(pickle.dumps(state), _got(second.get_state())[1]))
    state.last_heartbeats = {ours: datetime.now(UTC), theirs: before}
    bits, token, stored = _got(first.set_state(pickle.dumps(state), token))
    assert not stored and pickle.loads(bits).last_heartbeats[ours] == before
    state.last_heartbeats[ours] = datetime.now(UTC)
    assert _got(first.set_state(pickle.dumps(state), token))[2]


def test_a_deleted_state_is_an_error_at_once():
    store = HashStore()
    backend = StateBackend(store, "run", 2)
    state = pickle.dumps(dynamic_rendezvous._RendezvousState())
    token = _got(backend.set_state(state))[1]
    store.delete_key(KEY)
    with pytest.raises(RendezvousStateError, match="state was deleted: another program"):
        backend.get_state()
    # torch's handler writes it again and again, for as long as another node may be quicker.
    changed = dynamic_rendezvous._RendezvousState()
    changed.closed = True
    for expected in (token, None):
        with pytest.raises(RendezvousStateError, match="state was deleted: another program"):
            backend.set_state(pickle.dumps(changed), expected)


def test_a_store_that_does_not_answer_is_an_error(monkeypatch):
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.0)

    class Silent:
        def compare_set(self, *words):
            threading.Event().wait(60)

    with pytest.raises(RendezvousConnectionError, match="no answer within 0 s"):
        StateBackend(Silent(), "run", 2)


@pytest.mark.parametrize("form", [bytes, base64.b64encode], ids=["pickle", "base64"])
def test_a_pickle_in_the_store_is_never_read(form, tmp_path):
    store = HashStore()
    backend = StateBackend(store, "run", 2)
    store.set(KEY, form(pickle.dumps(_Harm(tmp_path / "harm"))))
    with pytest.raises(RendezvousStateError, match="invalid rendezvous state"):
        backend.get_state()
    assert not (tmp_path / "harm").exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda part: st.lists(part, max_size=4) | st.dictionaries(st.text(max_size=5), part),
    max_leaves=8,
)
FIELDS = tuple(json.loads(write_state(dynamic_rendezvous._RendezvousState(), Clock())))


@given(found=JSON | st.fixed_dictionaries(dict.fromkeys(FIELDS, JSON)))
def test_any_other_json_is_an_error_of_the_state(found):
    clock = Clock()
    try:
        state = read_state(json.dumps(found), clock, 30)
    except RendezvousStateError:
        return
    assert vars(read_state(write_state(state, clock), clock, 30)) == vars(state)


@given(text=st.text() | st.integers(3000, 6000).map(lambda depth: "[" * depth))
def test_any_other_text_is_an_error_of_the_state(text):
    with pytest.raises(RendezvousStateError):
        read_state(text, Clock(), 30)


@pytest.mark.parametrize(
    "old, new",
    [
        ('"round": 0', '"round": "0"'),
        ('"round": 0', '"round": 0.5'),
        ('"round": 0', '"round": true'),
        ('"round": 0', '"round": 1, "round": 0'),
        ('"complete": false', '"complete": "no"'),
        ('"closed": false', '"closed": 0'),
        ('"wait_list": []', '"wait_list": [["n0", "1", 0]]'),
        ('"wait_list": []', '"wait_list": [[1, 1, 0]]'),
        ('"participants": []', '"participants": [["n0", 1, 0, 1e0]]'),
    ],
)
def test_a_state_is_read_strictly(old, new):
    text = write_state(dynamic_rendezvous._RendezvousState(), Clock())
    assert old in text
    with pytest.raises(RendezvousStateError, match="invalid rendezvous state"):
        read_state(text.replace(old, new), Clock(), 30)
