"""The rendezvous of the native launcher: what it reads from the store of a network."""

import argparse
import base64
import json
import math
import os
import pickle
import platform
import re
import socket
import threading
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
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
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
    join_all,
    open_handler,
    read_state,
    write_state,
)
from fxtrain.launchers.orphans import MARK
from fxtrain.ops.rendezvous_store import open_store
from fxtrain.state.topology import Topology
from tests._errors import raises_code
from tests._patience import patience, wait_for
from tests._slow import slow_after

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
    slow_after(
        3,
        [
            ({0: (2, 600), 1: (3, 600)}, "was started for . nodes, and node . for [23]"),
            (
                {0: (3, 600), 1: (3, 600), 2: (2, 600)},
                "was started for . nodes, and node . for [23]",
            ),
            (
                {0: (4, 1), 1: (4, 600), 3: (4, 600)},
                "node 2 never joined within the .* s of node 0",
            ),
            ({0: (3, 600), 2: (3, 1)}, "node 1 never joined within the .* s of node 2"),
        ],
    ),
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
            join_all(stores[node], node, count, wait_s * patience())
        except RendezvousStateError as error:
            said[node] = str(error)
        stores[node] = None  # as where a process ends

    threads = [threading.Thread(target=join, args=(node, *how)) for node, how in nodes.items()]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(30 * patience())
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
            with pytest.raises(
                RendezvousStateError, match=f"{re.escape(platform.node())} differs from that"
            ):
                wait.result(20 * patience())


@pytest.mark.parametrize("who", slow_after(1, ["rank", "launcher"]))
def test_a_port_held_by_a_program_that_never_answers_is_an_error(who):
    """It accepts the connection, so that torch's store waits for its first word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        if who == "rank":
            topology = Topology(rank=1, world_size=2, main_port=port)
            with raises_code("FX102"):
                open_store(topology, 0.5)
            return
        launch = LaunchSpec(
            target="train.py", nodes=2, node_rank=1, main_port=port, connect_timeout_s=0.5
        )
        config = argparse.Namespace(run_id="run", rdzv_endpoint=f"127.0.0.1:{port}")
        with pytest.raises(RendezvousConnectionError, match="and did not answer as a store"):
            open_handler(launch, config, None)


@pytest.fixture
def run(monkeypatch):
    """A run of at most two nodes: `make` one, and `submit` what it does beside the others."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    store, config = HashStore(), argparse.Namespace()

    def make(least=2, **options):
        config.rdzv_configs = {
            "join_timeout": str(math.ceil(20 * patience())),
            "last_call_timeout": "1",
            **options,
        }
        config.run_id, config.rdzv_endpoint = "run", "127.0.0.1:1"
        config.min_nodes, config.max_nodes, config.local_addr = least, 2, "127.0.0.1"
        return ElasticRendezvous(store, config)

    with ThreadPoolExecutor() as pool:
        yield argparse.Namespace(make=make, submit=pool.submit, store=store)
        ElasticRendezvous(store, config).shutdown()  # so that none waits for another one


@pytest.mark.slow
def test_nodes_that_run_do_not_start_again_for_a_node_without_a_place(run, monkeypatch):
    """Such as one that waited while others started again, and was slower than they were."""
    first, second, slow = (run.make() for _ in range(3))
    look = StateBackend(run.store, "run", 3)  # sees a wait list as it is stored

    def listed(names, count):
        lists = lambda: [len(getattr(look.seen, f"{name}_list")) for name in names]  # noqa: E731
        wait_for(lambda: look.get_state() and sum(lists()) == count)

    run.submit(first.next_rendezvous)
    second.next_rendezvous()
    stands_by = run.submit(slow.next_rendezvous)
    listed(["redundancy"], 1)
    again = run.submit(first.next_rendezvous)
    listed(["wait"], 2)
    # What the slow one asks from here on is answered once the others have started again.
    started, ask = threading.Event(), slow._backend._asked
    monkeypatch.setattr(slow._backend, "_asked", lambda what: started.wait() and ask(what))
    second.next_rendezvous()
    again.result(20 * patience())
    assert second.num_nodes_waiting() == 0 and second.nodes_in_reserve() == 1
    started.set()
    listed(["wait"], 0)
    assert first.num_nodes_waiting() == 0 and first.nodes_in_reserve() == 1
    second.shutdown()
    assert isinstance(stands_by.exception(20 * patience()), RendezvousGracefulExitError)


@pytest.mark.slow
def test_a_node_that_stands_by_for_nodes_that_were_lost_waits_for_the_join_timeout_only(run):
    """It waits without a limit only while the others run, since it may have to replace one."""
    nodes = [run.make(keep_alive_interval="600") for _ in range(2)]
    stands_by = run.make(keep_alive_interval="600", join_timeout="1")
    for waits in [run.submit(node.next_rendezvous) for node in nodes]:
        waits.result(20 * patience())
    waits = run.submit(stands_by.next_rendezvous)
    wait_for(lambda: stands_by._backend.seen and stands_by._backend.seen.redundancy_list)
    for node in nodes:
        node._handler._stop_heartbeats()
    for node in nodes:
        _forget(node._handler._this_node, stands_by._backend)
    assert isinstance(waits.exception(20 * patience()), RendezvousTimeoutError)


def test_a_launcher_for_another_number_of_nodes_is_refused(run):
    run.make(1)
    with pytest.raises(RendezvousStateError, match="for 2 nodes, and the first one for 1 to 2"):
        run.make(2)
    run.make(1)


@pytest.mark.slow
def test_a_node_that_leaves_gives_its_place_away_before_its_heartbeats_are_missed(run):
    """Which takes as long as the test may."""
    stays, leaves, reserve = (run.make(keep_alive_interval="600") for _ in range(3))
    run.submit(stays.next_rendezvous)
    leaves.next_rendezvous()
    waits = run.submit(reserve.next_rendezvous)
    wait_for(lambda: stays.num_nodes_waiting() == 0 and stays.nodes_in_reserve() == 1)
    leaves.leave()
    wait_for(lambda: stays.num_nodes_waiting() == 1)
    assert {stays.next_rendezvous().rank, waits.result(20 * patience()).rank} == {0, 1}


@pytest.mark.parametrize("succeeded", [True, False])
def test_a_node_that_comes_back_after_the_run_has_ended_learns_how(succeeded, run):
    """Such as one whose place was given away while its ranks were ended to start again."""
    serves, late = run.make(1), run.make(1)
    serves.next_rendezvous()
    if succeeded:
        serves.succeed()
    serves.shutdown()
    with pytest.raises(RendezvousGracefulExitError if succeeded else RendezvousClosedError):
        late.next_rendezvous()


def test_the_launcher_that_serves_a_run_ends_after_all_others(run):
    serves, *others = (run.make(1) for _ in range(3))
    ends = run.submit(serves.end, 20 * patience())
    for other in others:
        assert not ends.done()
        other.end()
    ends.result(20 * patience())


@pytest.mark.parametrize("node", slow_after(1, [0, 1]))
def test_nodes_join_again_without_one_that_is_lost_once_it_has_joined(
    node, run, monkeypatch, tmp_path, capsys
):
    """Before the others know its ranks, for which they would wait until they end the run."""
    monkeypatch.setenv(MARK, "none")
    # Long enough for both to join, and then none for one that joins by itself.
    options = {"last_call_timeout": "600", "keep_alive_interval": "600"}
    handlers = [run.make(1, **options) for _ in range(2)]
    lost, stays = handlers.pop(node), *handlers  # torch numbers nodes in this order
    run.store.set_timeout(timedelta(seconds=1))  # for what the lost node never writes
    spec = WorkerSpec("default", 1, stays, entrypoint="none", local_addr="127.0.0.1")
    agent = _Agent(spec, DefaultLogsSpecs(str(tmp_path)))
    agent.launch, agent.serves = LaunchSpec(target="train.py", nodes=2, rendezvous="c10d"), True
    meets = run.submit(agent._rendezvous, agent._worker_group)
    with suppress(DistStoreError):  # which waits for what the other one writes
        lost.next_rendezvous()
    stays._handler.settings.timeout._set_timeouts(last_call=timedelta(seconds=1))
    lost._handler._stop_heartbeats()
    _forget(lost._handler._this_node, stays._backend)
    meets.result(60 * patience())
    assert agent._worker_group.group_world_size == 1
    assert "A node that had joined was lost before its ranks started." in capsys.readouterr().err


def _forget(node, backend):
    """Have the last heartbeat of a node that has joined be too old, until it was taken out."""

    def joined():
        return backend.seen is not None and node in backend.seen.participants

    def taken_out():
        text, at = backend._clock._seen[node]
        backend._clock._seen[node] = text, at - timedelta(hours=1)
        return not joined()

    wait_for(joined)
    wait_for(taken_out)


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
    monkeypatch.setattr(rendezvous, "_STORE_REPLY_S", 0.0)

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
