"""Several machines that call `launch` together: connecting and restarting together."""

import importlib
import socket
import time
from datetime import timedelta
from typing import Any

import attrs

from fxtrain.errors import LaunchError
from fxtrain.launchers.built_in.native.network import reach, serve, serve_nodes

_PORT = 29_500  # torch's own


@attrs.frozen(kw_only=True, eq=False)
class Nodes:
    """The machines of one launch, and the store through which they communicate.

    Attributes:
        count: Number of machines.
        rank: Number of this one.
        address: Host of the store.
        port: Its port.
        store: torch's TCPStore, served by node 0.
    """

    count: int
    rank: int
    address: str
    port: int
    store: Any


def connect_nodes(count: int, rank: int, address: str, port: int, *, timeout_s: float) -> Nodes:
    """Open the store, or connect to that of node 0.

    Effects:
        Node 0 listens at the address until the store is deleted; with one node on loopback, at a
        port that the system chooses.

    Raises:
        LaunchError: the port is in use, node 0 could not be reached in time, or this is node 0 and
            the address is another machine's.
    """
    # The ranks of one node reach it on loopback, whatever its name is elsewhere.
    place = address if count > 1 else "127.0.0.1"
    where = port or (_PORT if count > 1 else 0)
    who = f"Node {rank} of {count}"
    door = None
    if rank == 0:
        door = serve_nodes(place.strip("[]"), where, who=who) if count > 1 else serve(place, where)
        where = door.getsockname()[1]
    else:
        reach(place, where, who=who, timeout_s=timeout_s)
    try:
        store = open_store(place, where, door, timeout_s=timeout_s)
    except RuntimeError as error:
        raise LaunchError(
            f"{who} could not open the store at {place}:{where}: {error}. Check "
            f"that the port is free and not blocked by a firewall.",
            code="FX701",
        ) from error
    return Nodes(count=count, rank=rank, address=place, port=where, store=store)


def open_store(address: str, port: int, door: socket.socket | None, *, timeout_s: float) -> Any:
    """torch's store: served at a socket that already listens, which it then owns, or a client.

    Effects:
        Imports torch. Without its own socket, torch's store would listen on every interface.
    """
    distributed = importlib.import_module("torch.distributed")
    return distributed.TCPStore(
        address.strip("[]"),
        port,
        is_master=door is not None,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=None if door is None else door.detach(),
    )


def tell_failure(nodes: Nodes, attempt: int, text: str) -> None:
    """Tell the other nodes that a rank of this one has failed."""
    if nodes.count > 1:
        nodes.store.set(f"launch/{attempt}/failed", f"Node {nodes.rank}: {text}")


def failed_elsewhere(nodes: Nodes, attempt: int) -> str:
    """The failure that another node reported; empty for none."""
    key = f"launch/{attempt}/failed"
    if nodes.count == 1 or not nodes.store.check([key]):
        return ""
    return nodes.store.get(key).decode()


def wait_all_ended(nodes: Nodes, attempt: int, *, timeout_s: float | None) -> str:
    """Wait until the ranks of every node have finished, or one has failed.

    Returns:
        The failure that a node reported; empty if all succeeded.

    Raises:
        LaunchError: a node did not answer within `timeout_s`.
    """
    if nodes.count == 1:
        return ""
    start = time.monotonic()
    nodes.store.add(f"launch/{attempt}/ended", 1)
    while nodes.store.add(f"launch/{attempt}/ended", 0) < nodes.count:
        if told := failed_elsewhere(nodes, attempt):
            return told
        if timeout_s is not None and time.monotonic() - start > timeout_s:
            raise LaunchError(
                f"Node {nodes.rank} of {nodes.count}: its ranks finished, but those of other nodes "
                f"did not within {timeout_s:.0f} s. See the output of the other nodes."
            )
        time.sleep(0.1)
    return _leave_last(nodes, attempt)


def _leave_last(nodes: Nodes, attempt: int) -> str:
    """Node 0 serves the store, so it waits until the others have read that all finished."""
    left = nodes.store.add(f"launch/{attempt}/left", 1)
    start = time.monotonic()
    while nodes.rank == 0 and left < nodes.count and time.monotonic() - start < 10:
        time.sleep(0.05)
        left = nodes.store.add(f"launch/{attempt}/left", 0)
    return ""
