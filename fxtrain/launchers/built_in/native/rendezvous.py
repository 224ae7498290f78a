"""The rendezvous of torch's elastic agent; this module imports torch.

torch's own rendezvous serves its store on every interface, and unpickles a key of that store,
so anyone who reaches the port can run code. Here the store listens at one address, and its
content is JSON.
"""

import contextlib
import json
import math
import os
import pickle
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from fxtrain._secret import SECRET, derive_key, key_proof
from fxtrain.launchers.built_in.native.elastic import main_hint
from fxtrain.launchers.spec import LaunchSpec
from fxtrain.ops.rendezvous_store import first_line, tcp_store
from fxtrain.state.parsing import parse_json

BACKEND = "fxtrain"
T = TypeVar("T")
_EMPTY = "none"
_OTHER_SECRET = "fxtrain.other_secret."  # under which a node says so that has another one
_POLL_INTERVAL_S = 0.05
_STORE_REPLY_S = 5.0  # for the store to answer, which has no time limit of its own
_LATE_S = 4.0  # for a late answer, when the ranks have ended and start again
_SILENT_S = 5.0  # until the launcher says for which nodes it waits
# Errors when reading JSON of another structure.
_WRONG = (ValueError, TypeError, KeyError, AttributeError, OverflowError)


def open_handler(launch: LaunchSpec, config: Any, listener: socket.socket | None) -> Any:
    """The handler for a launch, with torch's `LaunchConfig` for it.

    The store is served by the process that passes a `listener`, a listening socket.

    Raises:
        RendezvousConnectionError: the store cannot be reached.
        RendezvousStateError: the nodes have different secrets.
    """
    host = config.rdzv_endpoint.rpartition(":")[0].strip("[]")
    port = launch.port if listener is None else listener.getsockname()[1]
    try:
        store = tcp_store(
            host,
            port,
            timedelta(seconds=launch.connect_timeout_s),
            is_master=listener is not None,
            # Without a socket of ours, it would listen on every interface.
            master_listen_fd=None if listener is None else os.dup(listener.fileno()),
        )
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise RendezvousConnectionError(str(error)) from error
    proof = key_proof(derive_key(os.environ.get(SECRET, "")))
    local_proof = proof or "none"
    if (
        store.compare_set(f"fxtrain.secret.{config.run_id}", "", local_proof).decode()
        != local_proof
    ):
        store.set(_OTHER_SECRET + config.run_id, platform.node())
        raise RendezvousStateError(
            f"{SECRET} on this node differs from that on another, or is set on one of them only."
        )
    # So that others cannot guess the keys of this run.
    own = PrefixStore(proof, store) if proof else store
    if launch.elastic:
        return ElasticRendezvous(own, config)
    return _StaticRendezvous(store, own, launch, config.run_id, (host, port))


class ElasticRendezvous:
    """torch's handler for nodes that join and leave, which says for which nodes it waits.

    Effects:
        Writes a line to standard error if nodes that join and leave are missing after a few
        seconds, or once if the store does not answer.

    Raises:
        RendezvousStateError: other launchers were started for other numbers of nodes.
    """

    def __init__(self, store: Any, config: Any) -> None:
        fewest, most = config.min_nodes, config.max_nodes
        wanted = f"{fewest} to {most}" if fewest < most else str(most)
        # The first launcher writes its numbers; the others read them.
        theirs = store.compare_set(f"fxtrain.nodes.{config.run_id}", "", wanted).decode()
        if theirs != wanted:
            raise RendezvousStateError(
                f"this launcher was started for {wanted} nodes, "
                f"and the first one for {theirs[:80]}."
            )
        options = config.rdzv_configs
        last_call_s = float(options.get("last_call_timeout", 30))
        beats = options.get("keep_alive_interval", 5), options.get("keep_alive_max_attempt", 3)
        # Until a node that was lost is noticed; those that joined with it wait no longer for it.
        self.noticed_s = float(beats[0]) * float(beats[1]) + _STORE_REPLY_S
        store.set_timeout(timedelta(seconds=self.noticed_s))
        backend = StateBackend(store, config.run_id, config.max_nodes, last_call_s)
        params = RendezvousParameters(
            BACKEND,
            config.rdzv_endpoint,
            config.run_id,
            config.min_nodes,
            config.max_nodes,
            config.local_addr,
            **options,
        )
        self._handler = dynamic.create_handler(store, backend, params)
        self._backend = backend
        self._before: dict[Any, int] = {}  # nodes of the attempt before
        self._fewest, self._wait_s = config.min_nodes, float(options["join_timeout"])
        self._place, self._run_id = config.rdzv_endpoint, config.run_id
        self._lost = False
        self._store, self._launchers = store, f"fxtrain.launchers.{config.run_id}"
        self._succeeded = f"fxtrain.succeeded.{config.run_id}"
        store.add(self._launchers, 1)

    def next_rendezvous(self) -> RendezvousInfo:
        """See `RendezvousHandler`."""
        self._backend.settle()
        # In a thread of its own: torch's handler blocks until the nodes have joined.
        timer = threading.Timer(_SILENT_S, self._note_missing)
        timer.daemon = True
        timer.start()
        try:
            info = self._handler.next_rendezvous()
        except RendezvousTimeoutError as error:
            state = self._backend.seen  # which this node has left
            joined = len(state.wait_list if state.complete else state.participants) + 1
            raise RendezvousTimeoutError(
                f"{joined} of {self._fewest} nodes joined within {self._wait_s:.0f} s."
            ) from error
        except RendezvousClosedError as error:
            # torch's handler knows this only of a launcher that already stands by.
            if self._store.check([self._succeeded]):
                raise RendezvousGracefulExitError("the run succeeded without this node") from error
            raise
        finally:
            timer.cancel()
        self._before = dict(self._backend.seen.participants)
        return info

    def _note_missing(self) -> None:
        state = self._backend.seen
        if state is None:
            return
        if self._handler._this_node in state.redundancy_list:
            other = " If it belongs to another run, end it, and choose another main_port for it."
            print_note(
                f"Run {self._run_id!r} at {self._place} has its {len(state.participants)} nodes. "
                f"This launcher stands by, to take the place of one that leaves."
                f"{'' if self._before else other}"
            )
            return
        # Those of a complete state are of the attempt before.
        joined = state.wait_list if state.complete else state.participants
        missing = {rank: node.addr for node, rank in self._before.items() if node not in joined}
        if missing:
            nodes = ", ".join(f"{rank} ({addr})" for rank, addr in sorted(missing.items()))
            print_note(
                f"Waiting for node{'s' * (len(missing) > 1)} {nodes} of the attempt before, or for "
                f"others in their place, for up to {self._wait_s:.0f} s."
            )
        elif len(joined) < self._fewest:
            print_note(
                f"{len(joined)} of {self._fewest} nodes have joined; waiting for the others for up "
                f"to {self._wait_s:.0f} s."
            )

    def num_nodes_waiting(self) -> int:
        """See `RendezvousHandler`; 0 if the run has ended, and while the store does not answer."""
        try:
            waiting = self._handler.num_nodes_waiting()
            return 0 if self._backend.seen.closed else waiting
        except RendezvousConnectionError as error:
            # An error here would end ranks that can finish without the rendezvous.
            if not self._lost:
                print_note(
                    f"The rendezvous at {self._place} does not answer: {error} The ranks of this "
                    f"node run on, but nodes can neither join nor restart."
                )
            self._lost = True
            return 0

    def nodes_in_reserve(self) -> int:
        """Nodes that have joined since the attempt began: they wait, or replace one that leaves."""
        state = self._backend.seen
        return len(state.wait_list) + len(state.redundancy_list) if state else 0

    def succeed(self) -> None:
        """Tell launchers that find the rendezvous closed that the run has succeeded."""
        self._store.set(self._succeeded, "")

    def end(self, wait_s: float = 0.0) -> None:
        """End the use of the store, and wait until all launchers of the run have ended theirs."""
        self._store.add(self._launchers, -1)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and self._store.add(self._launchers, 0) > 0:
            time.sleep(_POLL_INTERVAL_S)

    def leave(self) -> None:
        """Give up this node's place, which would otherwise be free after `noticed_s`."""
        with contextlib.suppress(RendezvousError):
            self._backend.remove(self._handler._this_node)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


class _StaticRendezvous(StaticTCPRendezvous):
    """Numbered nodes, or a single node, which join once through the given store."""

    def __init__(
        self, plain: Any, store: Any, launch: LaunchSpec, run_id: str, place: tuple[str, int]
    ) -> None:
        wait_s = math.ceil(launch.connect_timeout_s)
        super().__init__(*place, launch.node_rank, launch.nodes, run_id, wait_s)
        self._plain, self._shared = plain, PrefixStore(run_id, store)
        self._launch = launch
        self._joined = launch.nodes == 1

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class; the ranks use the same store."""
        if not self._joined:
            wait_s, hint = self._launch.connect_timeout_s, main_hint(self._launch)
            join_all(self._shared, self.rank, self.world_size, wait_s, hint, self._other_secret)
            self._joined = True
        place = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(self._shared, self.rank, self.world_size, place)

    def _other_secret(self) -> str:
        key = _OTHER_SECRET + self.get_run_id()
        if not self._plain.check([key]):
            return ""
        host = self._plain.get(key).decode(errors="replace")[:80]
        return (
            f"{SECRET} on {host} differs from that on another node, or is set on one of them only."
        )


def join_all(
    store: Any,
    node: int,
    count: int,
    wait_s: float,
    hint: str = "",
    refusal: Callable[[], str] = lambda: "",
) -> None:
    """Wait until every node of a launch has joined; `hint` is what may be wrong if some do not.

    `refusal` says why one never will.

    Effects:
        Writes a line to standard error if nodes are missing after a few seconds.

    Raises:
        RendezvousStateError: some never joined one of the nodes, which the message names, or nodes
            were started with other numbers of nodes; on every node that has joined.
    """
    store.set(f"node/{node}", json.dumps([count, platform.node()]))
    missing, start = set(range(count)) - {node}, time.monotonic()
    noted = False
    while missing and not store.check(["refused"]):
        why = refusal()
        for other in [*missing]:
            if store.check([f"node/{other}"]):
                missing.discard(other)
                theirs, host = parse_json(store.get(f"node/{other}"))
                if theirs != count:
                    why = (
                        f"node {other} on {str(host)[:80]} was started for {str(theirs)[:80]} "
                        f"nodes, and node {node} for {count}."
                    )
        waited_s = time.monotonic() - start
        names = ", ".join(str(other) for other in sorted(missing))
        who = f"node{'s' * (len(missing) > 1)} {names}"
        if missing and waited_s > wait_s:
            why = why or f"{who} never joined within the {wait_s:g} s of node {node}.{hint}"
        if why:
            store.compare_set("refused", "", why)  # the first one's, for all
        elif missing and waited_s > _SILENT_S and not noted:
            noted = True
            print_note(f"Node {node} of {count} waits for {who}, for up to {wait_s:.0f} s.{hint}")
        time.sleep(_POLL_INTERVAL_S)
    if store.check(["refused"]):
        why = store.get("refused").decode()
        store.set(f"knows/{node}", "")
        if node == 0:  # it serves the store, which ends with it
            came = [other for other in range(1, count) if store.check([f"node/{other}"])]
            with contextlib.suppress(RuntimeError):  # one has ended, or does not answer
                store.wait([f"knows/{other}" for other in came], timedelta(seconds=_LATE_S))
        raise RendezvousStateError(why)


class StateBackend(dynamic.RendezvousBackend):
    """The state of a rendezvous of nodes that join and leave, kept in the store as JSON.

    torch's handler passes the state as a pickle. Pickles are only created and read within this
    process.
    """

    def __init__(self, store: Any, run_id: str, max_nodes: int, last_call_s: float = 30.0) -> None:
        self._store, self._max_nodes = store, max_nodes
        self._key = f"fxtrain.rendezvous.{run_id}"
        self._clock, self._last_call_s = Clock(), last_call_s
        self._question: threading.Thread | None = None
        self.seen: Any = None  # the state that was read last
        # A store waits for a key that does not exist.
        self._exchange("", _EMPTY)

    @property
    def name(self) -> str:
        """See base class."""
        return BACKEND

    def get_state(self) -> tuple[bytes, Any] | None:
        """See base class."""
        return self._given(self._asked(self._get))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """See base class."""
        # A heartbeat that is not stored, since another node wrote first, was not sent.
        clock = self._clock.copy()
        # Created by this process's own handler.
        text = write_state(pickle.loads(state), clock)
        expected = _EMPTY if token is None else token
        stored = self._exchange(expected, text)
        if stored.decode() == text:
            self._clock = clock
        # A store answers so for a key that does not exist, and torch's handler would ask forever.
        if stored.decode() == expected != text:
            raise _deleted()
        given = self._given(stored)
        return None if given is None else (*given, given[1] == text)

    def remove(self, node: Any) -> None:
        """Take a node out of the participants, if others remain."""
        found: Any = self.get_state()
        while found is not None:  # until what is stored is without it
            state = pickle.loads(found[0])
            if node not in state.participants or len(state.participants) == 1:
                return
            del state.participants[node], state.last_heartbeats[node]
            found = self.set_state(pickle.dumps(state), found[1])

    def _given(self, stored: bytes) -> tuple[bytes, str] | None:
        """A state as torch's handler takes it, and the text by which the store compares it."""
        if stored == _EMPTY.encode():
            return None
        state = read_state(stored, self._clock, self._last_call_s)
        if state.complete and len(state.participants) >= self._max_nodes:
            # A node that waited while others of an attempt started again, and found no place. For
            # each node in the wait list, torch's agent starts the ranks of all nodes again.
            state.redundancy_list |= state.wait_list
            state.wait_list = set()
        self.seen = state
        return pickle.dumps(state), stored.decode()

    def _get(self) -> bytes:
        # For a key that does not exist, a store would wait.
        if not self._store.check([self._key]):
            raise _deleted()
        return self._store.get(self._key)

    def _exchange(self, expected: str, text: str) -> bytes:
        return self._asked(lambda: self._store.compare_set(self._key, expected, text))

    def settle(self) -> None:
        """Wait a last time for a question that is still open, such as while a network heals."""
        if self._question is not None:
            self._question.join(_LATE_S)

    def _asked(self, action: Callable[[], bytes]) -> bytes:
        """An answer of the store.

        Raises:
            RendezvousConnectionError: there is none, or none yet.
        """
        answers: list[bytes] = []
        errors: list[Exception] = []

        def ask() -> None:
            try:
                answers.append(action())
            except Exception as error:  # for the thread that waits
                errors.append(error)

        # Behind a question that is still open, another one would wait too.
        if self._question is None or not self._question.is_alive():
            # In a thread: a request to a store whose machine is gone may never return.
            self._question = threading.Thread(target=ask, name="fxtrain store", daemon=True)
            self._question.start()
            self._question.join(_STORE_REPLY_S)
        if not answers and not errors:
            raise RendezvousConnectionError(f"no answer within {_STORE_REPLY_S:.0f} s.")
        if errors and isinstance(errors[0], RendezvousStateError):
            raise errors[0]
        if errors:
            raise RendezvousConnectionError(first_line(errors[0])) from errors[0]
        return answers[0]


def _deleted() -> RendezvousStateError:
    return RendezvousStateError(
        "the rendezvous state was deleted: another program writes to the store. Set "
        f"{SECRET}, the same on every node, and choose another main_port."
    )


class Clock:
    """Times that other machines have written, in the time of this one.

    Clocks may differ by minutes, and torch's handler considers a node dead whose last heartbeat is
    too old. Here, a heartbeat is as old as this machine knows it.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, tuple[str, datetime]] = {}  # as written, and here

    def copy(self) -> "Clock":
        """A clock that knows the same times, and may learn others."""
        other = Clock()
        other._seen = dict(self._seen)
        return other

    def here(self, key: Any, written: str, new: datetime) -> datetime:
        """The time of this machine for a text that was read, which is `new` for another text."""
        if key not in self._seen or self._seen[key][0] != written:
            self._seen[key] = written, new
        return self._seen[key][1]

    def written(self, key: Any, here: datetime) -> str:
        """The text for a time: as it was written, if that was on another machine."""
        if key not in self._seen or self._seen[key][1] != here:
            self._seen[key] = here.isoformat(), here  # of this machine
        return self._seen[key][0]


def write_state(state: Any, clock: Clock) -> str:
    """torch's record of a rendezvous as JSON."""
    deadline = state.deadline
    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "deadline": None if deadline is None else clock.written(None, deadline),
            "closed": state.closed,
            "participants": [[*_words(node), rank] for node, rank in state.participants.items()],
            "wait_list": [_words(node) for node in sorted(state.wait_list)],
            "redundancy_list": [_words(node) for node in sorted(state.redundancy_list)],
            "last_heartbeats": [
                [*_words(node), clock.written(node, at)]
                for node, at in state.last_heartbeats.items()
            ],
        }
    )


def read_state(text: str | bytes, clock: Clock, last_call_s: float) -> Any:
    """torch's record of a rendezvous from JSON, with times of this machine.

    A new deadline is `last_call_s` away.

    Raises:
        RendezvousStateError: the JSON has another structure.
    """
    now = datetime.now(UTC)
    try:
        data = parse_json(text)
        state = dynamic._RendezvousState()
        state.round = _exactly(int, data["round"])
        state.complete = _exactly(bool, data["complete"])
        state.closed = _exactly(bool, data["closed"])
        if data["deadline"] is not None:
            until = now + timedelta(seconds=last_call_s)
            state.deadline = clock.here(None, _exactly(str, data["deadline"]), until)
        state.participants = {
            _node(*node): _exactly(int, rank) for *node, rank in data["participants"]
        }
        state.wait_list = {_node(*node) for node in data["wait_list"]}
        state.redundancy_list = {_node(*node) for node in data["redundancy_list"]}
        state.last_heartbeats = {
            _node(*node): clock.here(_node(*node), _exactly(str, at), now)
            for *node, at in data["last_heartbeats"]
        }
    except _WRONG as error:
        raise RendezvousStateError(
            f"The store contains an invalid rendezvous state ({type(error).__name__}: {error}). "
            f"Another program writes to it: choose another main_port."
        ) from error
    return state


def _words(node: Any) -> list[Any]:
    return [node.addr, node.pid, node.local_id]


def _node(addr: Any, pid: Any, local_id: Any) -> Any:
    return dynamic._NodeDesc(_exactly(str, addr), _exactly(int, pid), _exactly(int, local_id))


def _exactly(kind: type[T], value: Any) -> T:
    """A value of exactly this type: no "3" for 3, and no "no" for True."""
    if type(value) is not kind:
        raise TypeError(f"{str(value)[:80]!r} is not a {kind.__name__}")
    return value


def print_note(text: str) -> None:
    """Write a line of the launcher to standard error."""
    sys.stderr.write(f"fxtrain launch: {text}\n")
    sys.stderr.flush()
