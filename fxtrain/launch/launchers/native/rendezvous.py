"""The rendezvous of torch's elastic agent; this module imports torch.

torch's own rendezvous serves its store on every interface, and unpickles a key of that store,
so anyone who reaches the port can run code. Here the store listens at one address, and its
content is JSON.
"""

import json
import os
import pickle
import platform
import socket
import time
from datetime import datetime
from typing import Any, TypeVar

from torch.distributed import PrefixStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as dynamic

from fxtrain.launch.function.nodes import open_store
from fxtrain.launch.orphans import end_strays
from fxtrain.state import parse_json

__all__ = ["BACKEND", "StateBackend", "meet", "open_handler"]

BACKEND = "fxtrain"
T = TypeVar("T")
_EMPTY = "none"
_POLL_INTERVAL_S = 0.05
# Errors when reading JSON of another structure.
_WRONG = (ValueError, TypeError, KeyError, AttributeError, OverflowError)


def open_handler(params: RendezvousParameters) -> Any:
    """The handler for a launch; the settings are those that `elastic.py` writes.

    Raises:
        RendezvousConnectionError: the store cannot be reached.
    """
    host, _, port = params.endpoint.rpartition(":")
    wait_s = float(params.config["connect_timeout_s"])
    door = params.config["door"]
    listening = None if door is None else socket.socket(fileno=os.dup(door))
    try:
        store = open_store(host, int(port), listening, timeout_s=wait_s)
    except (RuntimeError, ValueError) as error:
        raise RendezvousConnectionError(f"The store at {params.endpoint}: {error}") from error
    if params.config["meets"] == "c10d":
        backend = StateBackend(store, params.run_id)
        return _CleaningRendezvous(dynamic.create_handler(store, backend, params), params)
    return _CleaningRendezvous(
        _StaticRendezvous(store, params, (host.strip("[]"), int(port))), params
    )


class _CleaningRendezvous:
    """A handler that ends remaining children of ranks before the next attempt starts."""

    def __init__(self, handler: RendezvousHandler, params: RendezvousParameters) -> None:
        self._handler = handler
        self._mark = params.config["mark"]
        self._patience_s = float(params.config["shutdown_s"])

    def next_rendezvous(self) -> RendezvousInfo:
        """As of the handler."""
        end_strays(self._mark, patience_s=self._patience_s, ask=True)
        return self._handler.next_rendezvous()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)


class _StaticRendezvous(RendezvousHandler):
    """Numbered nodes, or a single node, which meet once."""

    def __init__(self, store: Any, params: RendezvousParameters, place: tuple[str, int]) -> None:
        self._store = PrefixStore(params.run_id, store)
        self._run_id = params.run_id
        self._node = (int(params.config["rank"]), params.max_nodes)
        self._wait_s = float(params.config["connect_timeout_s"])
        self._place = place
        self._met = params.max_nodes == 1

    def get_backend(self) -> str:
        """See base class."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        if not self._met:
            meet(self._store, *self._node, self._wait_s)
            self._met = True
        return RendezvousInfo(self._store, *self._node, RendezvousStoreInfo(*self._place))

    def is_closed(self) -> bool:
        """See base class."""
        return False

    def set_closed(self) -> None:
        """See base class."""

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return 0

    def get_run_id(self) -> str:
        """See base class."""
        return self._run_id

    def shutdown(self) -> bool:
        """See base class."""
        return True


def meet(store: Any, node: int, count: int, wait_s: float) -> None:
    """Wait until every node of a launch has come.

    Raises:
        RendezvousTimeoutError: some never came; the message names them.
        RendezvousStateError: nodes were started with other numbers of nodes.
    """
    store.set(f"node/{node}", json.dumps([count, platform.node()]))
    missing, deadline = set(range(count)) - {node}, time.monotonic() + wait_s
    while missing:
        for other in [*missing]:
            if store.check([f"node/{other}"]):
                missing.discard(other)
                theirs, host = parse_json(store.get(f"node/{other}"))
                if theirs != count:
                    raise RendezvousStateError(
                        f"node {other} on {str(host)[:80]} was started for {str(theirs)[:80]} "
                        f"nodes, and this one for {count}."
                    )
        if missing and time.monotonic() > deadline:
            names = ", ".join(str(other) for other in sorted(missing))
            raise RendezvousTimeoutError(f"node{'s' * (len(missing) > 1)} {names} never came.")
        time.sleep(_POLL_INTERVAL_S)


class StateBackend(dynamic.RendezvousBackend):
    """The state of a rendezvous of nodes that join and leave, kept in the store as JSON.

    torch's handler passes the state as a pickle. Pickles are only created and read within this
    process.
    """

    def __init__(self, store: Any, run_id: str) -> None:
        self._store = store
        self._key = f"fxtrain.rendezvous.{run_id}"
        # A store waits for a key that does not exist.
        self._exchange("", _EMPTY)

    @property
    def name(self) -> str:
        """See base class."""
        return BACKEND

    def get_state(self) -> tuple[bytes, Any] | None:
        """See base class."""
        try:
            found = self._store.get(self._key)
        except RuntimeError as error:
            raise RendezvousConnectionError(f"Lost the connection to the store: {error}") from error
        return _given(found)

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """See base class."""
        text = write_state(pickle.loads(state))  # created by this process's own handler
        found = self._exchange(_EMPTY if token is None else token, text)
        given = _given(found)
        return None if given is None else (*given, given[1] == text)

    def _exchange(self, expected: str, text: str) -> bytes:
        try:
            return self._store.compare_set(self._key, expected, text)
        except RuntimeError as error:
            raise RendezvousConnectionError(f"Lost the connection to the store: {error}") from error


def _given(found: bytes) -> tuple[bytes, str] | None:
    """A state as torch's handler takes it, and the text by which the store compares it."""
    if found == _EMPTY.encode():
        return None
    return pickle.dumps(read_state(found)), found.decode()


def write_state(state: Any) -> str:
    """torch's record of a rendezvous as JSON."""
    return json.dumps(
        {
            "round": state.round,
            "complete": state.complete,
            "deadline": None if state.deadline is None else state.deadline.isoformat(),
            "closed": state.closed,
            "participants": [[*_words(node), rank] for node, rank in state.participants.items()],
            "wait_list": [_words(node) for node in sorted(state.wait_list)],
            "redundancy_list": [_words(node) for node in sorted(state.redundancy_list)],
            "last_heartbeats": [
                [*_words(node), at.isoformat()] for node, at in state.last_heartbeats.items()
            ],
        }
    )


def read_state(text: str | bytes) -> Any:
    """torch's record of a rendezvous from JSON.

    Raises:
        RendezvousStateError: the JSON has another structure.
    """
    try:
        found = parse_json(text)
        state = dynamic._RendezvousState()
        state.round = _exactly(int, found["round"])
        state.complete = _exactly(bool, found["complete"])
        state.closed = _exactly(bool, found["closed"])
        if found["deadline"] is not None:
            state.deadline = datetime.fromisoformat(found["deadline"])
        state.participants = {
            _node(*node): _exactly(int, rank) for *node, rank in found["participants"]
        }
        state.wait_list = {_node(*node) for node in found["wait_list"]}
        state.redundancy_list = {_node(*node) for node in found["redundancy_list"]}
        state.last_heartbeats = {
            _node(*node): datetime.fromisoformat(at) for *node, at in found["last_heartbeats"]
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
