"""The rendezvous store of the ranks, served by rank 0 unless the launcher does."""

import contextlib
import errno
import logging
import platform
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from fxtrain._addresses import listen
from fxtrain._secret import SECRET, key_proof
from fxtrain._version import __version__
from fxtrain.errors import ContextError
from fxtrain.ops.closing import within
from fxtrain.state.topology import Topology

# Time for the other ranks to read why they do not join.
_READERS_WAIT = timedelta(seconds=10)
_ABSENT = "absent"
_QUIET_S = 10.0  # of waiting for other ranks, before a line about it is written
_MORE_S = 0.25  # for torch's own error, which comes at the timeout
_LOG = logging.getLogger(__name__)


def open_store(topology: Topology, timeout_s: float, *, key: bytes = b"") -> Any:
    """Connect to the store at the main address and wait until every rank has joined.

    Rank 0 listens at the main address, unless the launcher does. If the address belongs to this
    machine, it listens on no other interface. Logs a warning after ten seconds of waiting, which
    names the ranks that are missing. If one never joins, or the ranks have different secrets (from
    which `key` is derived) or versions, every rank that has joined raises.
    """
    where = f"{topology.main_address}:{topology.main_port}"
    me = f"Rank {topology.rank} of {topology.world_size}"
    # A store that outlives its ranks contains keys of earlier attempts. One served by rank 0
    # does not, and a node that joined later has counted fewer attempts.
    attempt = topology.attempt if topology.store_is_served else 0
    try:
        with _logged_wait(topology, timeout_s):
            tcp = _connected(topology, timedelta(seconds=timeout_s))
        # Keys outlive a closed context, so each connection of a process uses new ones.
        count = tcp.add(f"fxtrain/{attempt}/connections/{topology.rank}", 1)
        store = dist.PrefixStore(f"fxtrain/{attempt}/{count}", tcp)
        store.add(f"same/{_identity(key)}", 1)
        # So that others cannot guess the keys of a run that has a secret.
        secured = dist.PrefixStore(key_proof(key), store) if key else store
        secured.set(f"host/{topology.rank}", platform.node())
        store.set(f"hello/{topology.rank}", _identity(key))
    except (RuntimeError, ValueError, OSError) as error:
        raise ContextError(
            f"{me} could not reach the main address {where} within {timeout_s:g} s: "
            f"{first_line(error)} Check that rank 0 runs there, that no other program uses the "
            f"port and no firewall blocks it, and that every rank has the same MASTER_ADDR and "
            f"MASTER_PORT.",
            code="FX102",
        ) from error
    keys = {rank: f"hello/{rank}" for rank in range(topology.world_size)}
    try:
        try:
            _wait_for(store, keys, topology, timeout_s)
        except dist.DistStoreError:  # the time is up
            if missing := _missing(store, keys):
                _give_up(store, f"{me} waited {timeout_s:g} s at {where}", missing, keys)
        late = store.get("late").decode() if store.check(["late"]) else ""
        others = {} if late else _ranks_that_differ(topology, store, key)
        if late or others:
            _wait_for_readers(topology, store, keys)
    except RuntimeError as error:
        raise ContextError(
            f"{me} lost the store at {where}, which rank 0 or its launcher serves, before all "
            f"ranks had joined: {first_line(error)} Check the output of rank 0.",
            code="FX102",
        ) from error
    if late:
        raise ContextError(late, code="FX102")
    if others:
        raise ContextError(_difference(me, key, others), code="FX103")
    return secured


def _give_up(store: Any, who: str, missing: Sequence[int], keys: Mapping[int, str]) -> None:
    """Report to all ranks that some never joined, and wake those that wait for them."""
    names = ", ".join(map(str, missing))
    text = (
        f"{who}, and these ranks never joined: {names}. Check their output, or raise "
        f"detect(timeout_s=...)."
    )
    store.compare_set("late", "", text)  # the first one's, for all
    for rank in missing:
        store.compare_set(keys[rank], "", _ABSENT)


def _wait_for(store: Any, keys: Mapping[int, str], topology: Topology, timeout_s: float) -> None:
    """Wait for the keys of all ranks; rank 0 logs who is awaited if that takes long."""
    names, left_s = list(keys.values()), timeout_s
    if topology.rank == 0 and timeout_s > _QUIET_S:
        left_s -= _QUIET_S
        try:
            return store.wait(names, timedelta(seconds=_QUIET_S))
        except RuntimeError:
            _log_wait(topology, f"rank {', '.join(map(str, _missing(store, keys)))}")
    return store.wait(names, timedelta(seconds=left_s))


@contextlib.contextmanager
def _logged_wait(topology: Topology, timeout_s: float) -> Iterator[None]:
    """Log, once per node, that a block waits for the store if that takes long."""
    timer = threading.Timer(_QUIET_S, _log_wait, [topology, "the store that rank 0 serves"])
    timer.daemon = True
    if topology.local_rank == 0 and timeout_s > _QUIET_S:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _log_wait(topology: Topology, awaited: str) -> None:
    by_hand = topology.launcher in ("torchrun", "plain")
    alone = " To run on this process alone, unset RANK and WORLD_SIZE." if by_hand else ""
    _LOG.warning(
        f"Rank {topology.rank} of {topology.world_size} has waited {_QUIET_S:g} s for {awaited} "
        f"at {topology.main_address}:{topology.main_port}.{alone}"
    )


def _connected(topology: Topology, wait: timedelta) -> Any:
    """A connection to the store, which this rank serves if it is rank 0 and no launcher does."""
    serves = topology.rank == 0 and not topology.store_is_served
    return tcp_store(
        topology.main_address,
        topology.main_port,
        wait,
        world_size=topology.world_size,
        is_master=serves,
        multi_tenant=True,
        master_listen_fd=_listening_socket(topology) if serves else None,
    )


def tcp_store(address: str, port: int, wait: timedelta, **options: Any) -> Any:
    """torch's store at an address, served by this process or by another one.

    `options` are further arguments of `TCPStore`.

    Raises:
        TimeoutError: the process that listens there never answered.
        RuntimeError: none listens there, or the port is in use.
    """
    stores: list[Any] = []
    errors: list[Exception] = []

    def connect() -> None:
        try:
            stores.append(
                dist.TCPStore(address, port, timeout=wait, wait_for_workers=False, **options)
            )
        except Exception as error:  # for the thread that waits
            errors.append(error)

    # torch waits without a limit for the first answer of a process that has accepted a connection.
    ended = within(wait.total_seconds() + _MORE_S, connect)
    if errors:
        raise errors[0]
    if not ended:
        raise TimeoutError(
            "a program that listens there accepted the connection, and did not answer as a store."
        )
    return stores[0]


def _listening_socket(topology: Topology) -> int | None:
    """The descriptor of a socket that listens at the main address; torch takes ownership.

    None if the port is in use: a closed context of this process serves it until the process
    ends, and torch detects whether that is the case.
    """
    try:
        return listen(topology.main_address, topology.main_port).detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return None


def _identity(key: bytes) -> str:
    """What must be equal on all ranks: the secret, whose proof this has, and versions."""
    # The part of torch's version after "+" is the device for which it was built.
    torch_version = torch.__version__.partition("+")[0]
    return f"{key_proof(key)}/fxtrain {__version__} and torch {torch_version}"


def _ranks_that_differ(topology: Topology, store: Any, key: bytes) -> dict[int, str]:
    """The ranks whose secret or versions differ from this rank's, with what they have.

    Every rank counts the ranks that are the same, so that all notice if one differs.
    """
    ranks = range(topology.world_size)
    if store.add(f"same/{_identity(key)}", 0) == len(ranks):
        return {}
    greetings = {rank: store.get(f"hello/{rank}").decode() for rank in ranks}
    return {rank: text for rank, text in greetings.items() if text != _identity(key)}


def _wait_for_readers(topology: Topology, store: Any, keys: Mapping[int, str]) -> None:
    """Let ranks that have joined read why they fail before rank 0, which may serve the store."""
    store.set(f"knows/{topology.rank}", "")
    if topology.rank == 0:
        joined = [rank for rank, key in keys.items() if store.get(key).decode() != _ABSENT]
        with contextlib.suppress(dist.DistStoreError):  # one has ended meanwhile
            store.wait([f"knows/{rank}" for rank in joined], _READERS_WAIT)


def _difference(me: str, key: bytes, others: dict[int, str]) -> str:
    proof, _, versions = _identity(key).partition("/")
    secret = [str(rank) for rank, text in others.items() if text.partition("/")[0] != proof]
    if secret:
        return (
            f"{me}: {SECRET} on this rank differs from that on ranks {', '.join(secret)}, or is "
            f"set on one side only. Set the variable to the same secret on every rank, or on none."
        )
    theirs = "; ".join(
        f"rank {rank} has {text.partition('/')[2]}" for rank, text in sorted(others.items())[:8]
    )
    return f"{me} has {versions}, but {theirs}. Install the same versions on every machine."


def _missing(store: Any, keys: Mapping[int, str]) -> list[int]:
    """The ranks that have not joined."""
    return [rank for rank, key in keys.items() if not store.check([key])]


def first_line(error: BaseException) -> str:
    """The first line of an error message, as a sentence.

    Without the place in gloo's sources, and what gloo adds to it for everybody.
    """
    text = str(error).strip().splitlines()
    line = text[0] if text else type(error).__name__
    line = re.sub(r"\[(enforce fail at )?\S*/gloo/\S+:\d+\] ", "", line)
    line = re.sub(r"\.?\s*(This is typically caused|GLHF!).*", "", line)
    return line if line.endswith("?") else line.rstrip(".") + "."
