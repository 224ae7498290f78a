"""Several machines that call `launch` together: meeting, and starting again together."""

import importlib
import time
from datetime import timedelta
from typing import Any

import attrs

from fxtrain._errors import LaunchError
from fxtrain.launch._network import check_free, reach

__all__ = ["Nodes", "agree_that_all_ended", "failed_elsewhere", "meet", "tell_failure"]

_PORT = 29_500  # torch's own


@attrs.frozen(kw_only=True, eq=False)
class Nodes:
    """The machines of one launch, and the store through which they talk.

    Attributes:
        count: How many.
        rank: Number of this one.
        address: Where the store is.
        port: Its port.
        store: torch's TCP store; node 0 serves it.
    """

    count: int
    rank: int
    address: str
    port: int
    store: Any


def meet(count: int, rank: int, address: str, port: int, *, timeout_s: float) -> Nodes:
    """Open the store, or connect to that of node 0.

    Effects:
        Node 0 listens on the port until the store is dropped; one that the system picks when
        there is one node.

    Raises:
        LaunchError: the port is taken, or node 0 was not reached in time.
    """
    place, where = address or "127.0.0.1", port or (_PORT if count > 1 else 0)
    if count > 1 and rank == 0:
        check_free(where)
    elif rank > 0:
        reach(place, where, who=f"Node {rank} of {count}", timeout_s=timeout_s)
    # torch is loaded by now or will be: the store at which the ranks meet is torch's. On one
    # node it listens on a port that the system picks, here, so that nobody can take it first.
    distributed = importlib.import_module("torch.distributed")
    try:
        store = distributed.TCPStore(
            place,
            where,
            is_master=rank == 0,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
    except RuntimeError as error:
        raise LaunchError(
            f"Node {rank} of {count} could not open the store at {place}:{where}: {error}"
        ) from error
    return Nodes(count=count, rank=rank, address=place, port=store.port, store=store)


def tell_failure(nodes: Nodes, attempt: int, text: str) -> None:
    """Let the other nodes know that a rank of this one has failed."""
    if nodes.count > 1:
        nodes.store.set(f"launch/{attempt}/failed", f"Node {nodes.rank}: {text}")


def failed_elsewhere(nodes: Nodes, attempt: int) -> str:
    """What another node told of its failure; empty for nothing."""
    key = f"launch/{attempt}/failed"
    if nodes.count == 1 or not nodes.store.check([key]):
        return ""
    return nodes.store.get(key).decode()


def agree_that_all_ended(nodes: Nodes, attempt: int, *, timeout_s: float | None) -> str:
    """Wait until the ranks of every node have ended, or one has failed.

    Returns:
        What a node told of its failure; empty when all ended well.

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
                f"Node {nodes.rank} of {nodes.count}: its ranks ended well, and those of other "
                f"nodes did not within {timeout_s:.0f} s."
            )
        time.sleep(0.1)
    return _leave_last(nodes, attempt)


def _leave_last(nodes: Nodes, attempt: int) -> str:
    """Node 0 serves the store, so it waits until the others have read that all ended."""
    left = nodes.store.add(f"launch/{attempt}/left", 1)
    start = time.monotonic()
    while nodes.rank == 0 and left < nodes.count and time.monotonic() - start < 10:
        time.sleep(0.05)
        left = nodes.store.add(f"launch/{attempt}/left", 0)
    return ""
