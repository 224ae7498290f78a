"""The store at which ranks meet: rank 0 serves it, unless their launcher does."""

import errno
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from fxtrain._errors import ContextError
from fxtrain._listen import listen
from fxtrain._secret import SECRET, key_proof
from fxtrain.state import Topology

__all__ = ["first_line", "open_store"]

# For the other ranks to read that the secrets differ.
_SECRET_WAIT = timedelta(seconds=10)


def open_store(topology: Topology, timeout_s: float, *, key: bytes = b"") -> Any:
    """Meet at the main address and wait until every rank has said hello.

    Args:
        topology: Where this rank is, and where all meet.
        timeout_s: Longest wait for the other ranks.
        key: Of the run's secret; empty without one.

    Effects:
        Rank 0 listens at the main address, unless its launcher does. It listens on no other
        interface where the address is one of this machine.

    Raises:
        ContextError: the store cannot be opened or reached, a rank never joined, or the ranks
            have different secrets; the last on every rank.
    """
    where = f"{topology.main_address}:{topology.main_port}"
    me = f"Rank {topology.rank} of {topology.world_size}"
    # A store that outlives its ranks has keys of earlier attempts. One that rank 0 serves has
    # not, and a node that joined later has counted fewer of them.
    attempt = topology.attempt if topology.store_is_served else 0
    try:
        tcp = _connected(topology, timedelta(seconds=timeout_s))
        # Keys outlive a closed context, so each connection of a process gets fresh ones.
        count = tcp.add(f"fxtrain/{attempt}/connections/{topology.rank}", 1)
        store = dist.PrefixStore(f"fxtrain/{attempt}/{count}", tcp)
        store.add(f"secret/{key_proof(key)}", 1)
        store.set(f"hello/{topology.rank}", key_proof(key))
    except (RuntimeError, ValueError, OSError) as error:
        raise ContextError(
            f"{me} could not reach the main address {where} within {timeout_s:g} s: "
            f"{first_line(error)} Check that rank 0 runs there, that the port is free and "
            f"open, and that every rank has the same MASTER_ADDR and MASTER_PORT."
        ) from error
    keys = {rank: f"hello/{rank}" for rank in range(topology.world_size)}
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
        others = _ranks_with_other_secret(topology, store, key)
    except RuntimeError as error:
        missing = _missing(store, keys)
        raise ContextError(
            f"{me} waited {timeout_s:g} s at {where}, and these ranks never joined: "
            f"{', '.join(map(str, missing)) or 'none, but too late'}. Look at their output, "
            f"or give detect a longer timeout_s."
        ) from error
    if others:
        raise ContextError(
            f"{me}: {SECRET} of this rank is not that of the ranks {', '.join(map(str, others))}, "
            f"or one of the sides has none. Set the variable to the same secret for every rank, "
            f"or for no rank."
        )
    return store


def _connected(topology: Topology, wait: timedelta) -> Any:
    """A connection to the store, which this rank serves if it is the one to do so."""
    serves = topology.rank == 0 and not topology.store_is_served
    door = _listening_socket(topology) if serves else None
    return dist.TCPStore(
        topology.main_address,
        topology.main_port,
        topology.world_size,
        is_master=serves,
        timeout=wait,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=door,
    )


def _listening_socket(topology: Topology) -> int | None:
    """The descriptor of a socket that listens at the main address, for torch to own.

    None where the port is in use: a context of this process that was closed serves it until
    the process ends, and torch knows whether that is so.
    """
    try:
        return listen(topology.main_address, topology.main_port).detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _ranks_with_other_secret(topology: Topology, store: Any, key: bytes) -> list[int]:
    """The ranks whose secret is not this rank's.

    Every rank counts those that are like it, so that all find out where one differs. The rank
    that serves the store leaves once the others know.
    """
    ranks = range(topology.world_size)
    if store.add(f"secret/{key_proof(key)}", 0) == len(ranks):
        return []
    mine = key_proof(key).encode()
    found = [rank for rank in ranks if store.get(f"hello/{rank}") != mine]
    store.set(f"secret-differs/{topology.rank}", "")
    if topology.rank == 0:
        store.wait([f"secret-differs/{rank}" for rank in ranks], _SECRET_WAIT)
    return found


def _missing(store: Any, keys: Mapping[int, str]) -> list[int]:
    """The ranks that said nothing; rank 0 if it is gone, and with it what the others said."""
    try:
        return [rank for rank, key in keys.items() if not store.check([key])]
    except RuntimeError:
        return [0]


def first_line(error: BaseException) -> str:
    """What an error says first, as a sentence."""
    text = str(error).strip().splitlines()
    return (text[0].rstrip(".") if text else type(error).__name__) + "."
