"""Closing a context: destroying its groups and informing the other ranks."""

import atexit
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch import distributed as dist

from fxtrain.state import CommState
from fxtrain.state.topology import Topology

_LONGEST_CLOSE_S = 5.0
# Time limit for a write without reply; an earlier unanswered request may delay it.
_WRITE_S = 0.25
_POLL_INTERVAL_S = 0.05
_ON_HOST = {"gloo", "mpi", "fake", "xla"}


def make_close(
    state: CommState, timeout_s: float, *, topology: Topology | None = None, store: Any = None
) -> Callable[[BaseException | None], None]:
    """A function that closes what was opened, once, and at the latest when the process ends.

    `state` has the groups that were opened in addition to an existing process group. With
    `topology` and `store`, those of a run whose default group was opened here, it closes all
    groups, and the other ranks receive the reason; it waits for them 5 s, or `timeout_s`, at most.
    """
    open_world: list[Any] = [dist.group.WORLD]  # empty once it is closed
    patience_s = min(_LONGEST_CLOSE_S, timeout_s)

    def close_groups(error: BaseException | None) -> None:
        if topology is not None and not serves:
            atexit.unregister(at_exit)
        # What stays registered holds no group, whose sockets and threads would stay open.
        world = open_world.pop() if open_world else None
        opened = [state.opened_groups.pop() for _ in range(len(state.opened_groups))]
        if world is None or not dist.is_initialized() or dist.group.WORLD is not world:
            return
        groups: list[Any] = [world]
        if topology is None:
            groups = opened
        else:
            word = "" if error is None else f"{type(error).__name__}: {error}"
            longest_s = patience_s + 1 if error is None else _WRITE_S
            within(longest_s, partial(_announce_exit, topology, store, word, patience_s))
        if error is not None:
            abort_groups(groups, patience_s)
            return
        for group in groups:
            dist.destroy_process_group(group)

    def at_exit() -> None:
        # Python sets last_value before the functions of atexit run, if an exception ends the
        # script.
        close_groups(getattr(sys, "last_value", None))

    # The rank that serves the store holds it until exit, even after a close: another rank may still
    # connect to it.
    serves = topology is not None and topology.rank == 0 and not topology.store_is_served
    if topology is not None:
        atexit.register(at_exit)
    return close_groups


def within(patience_s: float, action: Callable[[], None]) -> bool:
    """Run an action, for as long as `patience_s` at most; whether it ended.

    torch's calls of a store that another machine serves have no time limit: if that machine loses
    its power or its network, no answer and no reset arrives.
    """
    # A daemon, so that an action that never ends does not keep the process from ending.
    thread = threading.Thread(target=action, name="fxtrain-within", daemon=True)
    thread.start()
    thread.join(patience_s)
    return not thread.is_alive()


def answered(patience_s: float, question: Callable[[], object]) -> bool:
    """Ask a store something; whether it answered in time, and without an error."""
    errors: list[RuntimeError] = []

    def ask() -> None:
        try:
            question()
        except RuntimeError as error:  # the process that serves it has ended
            errors.append(error)

    return within(patience_s, ask) and not errors


def read_views(
    store: Any, keys: Mapping[int, Mapping[str, str]], views: dict[int, str], deadline: float
) -> None:
    """Add to `views` what other ranks write to the store, until all have or the deadline passes.

    `keys` has, by rank, those under which it may write, each with the text before what it writes.
    """
    while missing := keys.keys() - views.keys():
        for rank in missing:
            if time.monotonic() > deadline:  # a question per rank takes long at thousands of them
                return
            for key, before in keys[rank].items():
                if rank not in views and store.check([key]):
                    views[rank] = before + store.get(key).decode()
        time.sleep(_POLL_INTERVAL_S)


def waits_on_device(group: Any) -> bool:
    """Whether collectives of a group are kernels, which the device waits for, as with NCCL."""
    pairs = dist.get_backend_config(group).split(",")
    return bool({pair.rpartition(":")[2] for pair in pairs} - _ON_HOST)


def interrupt(groups: Sequence[Any]) -> None:
    """Abort the communicators of groups, so that the device does not wait for other ranks.

    NCCL ends a communicator once kernels that precede its own have ended, which may be those of
    another one: so all are aborted at the same time.
    """
    threads = [
        threading.Thread(target=group.abort, name="fxtrain-abort", daemon=True)
        for group in groups
        if waits_on_device(group)
    ]
    for thread in threads:
        thread.start()


def abort_groups(groups: Sequence[Any], patience_s: float) -> None:
    """Give up what groups are doing; returns after `patience_s` at the latest.

    `destroy_process_group` is a collective under NCCL, and waits for kernels in flight: a rank
    that leaves with an error would wait for peers that wait for it.
    """

    def leave() -> None:
        for group in groups:
            if waits_on_device(group):
                dist.distributed_c10d._abort_process_group(group)
            else:
                dist.destroy_process_group(group)

    within(patience_s, leave)


def _announce_exit(topology: Topology, store: Any, word: str, patience_s: float) -> None:
    """Report why this rank leaves; the rank that serves the store leaves last."""
    try:
        store.set(f"world/left/{topology.rank}", f" with {word}" if word else "")
        if topology.rank == 0 and not word and not topology.store_is_served:
            keys = [f"world/left/{rank}" for rank in range(topology.world_size)]
            store.wait(keys, timedelta(seconds=patience_s))
    except RuntimeError:
        return  # the store is gone: no rank is left to read
