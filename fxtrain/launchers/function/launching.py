"""`launch`: a function on several ranks, from a script or a notebook cell."""

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

from fxtrain._addresses import find_route, loopback_route
from fxtrain._secret import SECRET, fresh_secret
from fxtrain.errors import LaunchError
from fxtrain.launchers.function.nodes import (
    Nodes,
    connect_nodes,
    failed_elsewhere,
    tell_failure,
    wait_all_ended,
)
from fxtrain.launchers.function.pickling import unpack
from fxtrain.launchers.function.workers import Rank, end, start, watched
from fxtrain.launchers.machine import usable_cores
from fxtrain.launchers.orphans import MARK, mark_within
from fxtrain.launchers.outcome import Failure, LaunchResult, by_cause, describe
from fxtrain.launchers.program import QUIET
from fxtrain.launchers.spec import LaunchSpec, check_ranks, check_seconds, rank_environment

# Time for the other ranks to report their errors after one has failed, before they are ended.
_GRACE_S = 2.0
# Interval between checks of what other nodes report.
_POLL_INTERVAL_S = 0.5
_NOT_STARTED = (
    "it exited before the function was called; see its output above for the reason. A script "
    'must call fx.launch under `if __name__ == "__main__":`, since every rank imports the '
    "script."
)
# Time for ranks that have answered to exit by themselves.
_LEAVE_S = 10.0

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    args: Sequence[object] = (),
    *,
    ranks: int = 2,
    timeout_s: float | None = None,
    restarts: int = 0,
    nodes: int = 1,
    node_rank: int = 0,
    main_address: str = "",
    main_port: int = 0,
    connect_timeout_s: float = 600.0,
) -> list[T]:
    """Call a function on several ranks of this machine, each in its own process.

    In `fn`, `fx.detect()` finds the rank. Each process is a new interpreter, so a script must call
    `launch` under `if __name__ == "__main__":`. A function defined in a notebook cell or at a
    prompt is sent by value, which needs cloudpickle. Without it, the processes are
    single-threaded forks of this one, as long as no accelerator is in use here.

    For a run on several machines, call `launch` on each of them with its own `node_rank` and
    otherwise equal arguments.

    Args:
        fn: What to run on every rank.
        args: Its arguments, the same on every rank.
        ranks: Processes to start, on each node.
        timeout_s: Maximum time for the whole call, in seconds; no limit by default.
        restarts: Maximum restarts of all ranks, on every node, after one has failed.
        nodes: Number of machines.
        node_rank: Number of this one, from 0.
        main_address: Host name or address of node 0.
        main_port: TCP port there; 29500 with several nodes.
        connect_timeout_s: Maximum wait for node 0, in seconds.

    Returns:
        The return values of `fn`, by rank, of the ranks of this node.

    Effects:
        Starts `ranks` processes and ends them. Meanwhile a TCP port is open: on loopback, chosen by
        the system, or `main_port` on node 0 of several nodes.

    Raises:
        LaunchError: the ranks could not be started, the nodes could not connect, ranks failed
            (the message has rank and traceback) more often than `restarts` allows, or the ranks
            did not finish within `timeout_s`.

    Example:
        >>> import fxtrain as fx
        >>> fx.launch(divmod, (7, 2), ranks=1)
        [(3, 1)]
    """
    _check(fn, args, ranks, timeout_s)
    # The record checks numbers and addresses.
    spec = LaunchSpec(
        target=getattr(fn, "__name__", "fn"),
        ranks=ranks,
        restarts=restarts,
        nodes=nodes,
        node_rank=node_rank,
        main_address=main_address,
        main_port=main_port,
        connect_timeout_s=connect_timeout_s,
    )
    if nodes > 1 and not main_address:
        raise LaunchError(
            f"launch(nodes={nodes}): several nodes need an address to connect to. Set main_address "
            f"to the host name or address of node 0, the same on every node."
        )
    _check_xla()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    all_nodes = connect_nodes(
        nodes, node_rank, main_address, main_port, timeout_s=connect_timeout_s
    )
    problem = ""
    for attempt in range(restarts + 1):
        values, problem = _attempt(fn, tuple(args), spec, all_nodes, attempt, (deadline, timeout_s))
        if not problem:
            return values
    raise LaunchError(problem)


def _attempt(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    spec: LaunchSpec,
    nodes: Nodes,
    attempt: int,
    limit: tuple[float | None, float | None],
) -> tuple[list[Any], str]:
    """Start all ranks once; return their values, or what went wrong."""
    place = functools.partial(
        rank_environment, ranks=spec.ranks, port=nodes.port, address=nodes.address,
        nodes=nodes.count, node_rank=nodes.rank, attempt=attempt,
    )  # fmt: skip
    shared = {**_unset(QUIET), **_traffic(nodes), **_secret(nodes), MARK: mark_within(os.environ)}
    places = [{**shared, **place(rank)} for rank in range(spec.ranks)]
    threads = max(1, len(usable_cores()) // spec.ranks)
    started = start(fn, args, places, threads=threads)
    try:
        elsewhere = functools.partial(failed_elsewhere, nodes, attempt)
        with watched(started):
            results = _results(started, limit, elsewhere if nodes.count > 1 else None)
            if isinstance(results, str):
                tell_failure(nodes, attempt, results)
            else:
                results = wait_all_ended(nodes, attempt, timeout_s=_left(limit[0])) or results
    except BaseException:
        end(started, patience_s=0)
        raise
    failed = isinstance(results, str)
    end(started, patience_s=0 if failed else _LEAVE_S)
    return ([], results) if isinstance(results, str) else (results, "")


def _traffic(nodes: Nodes) -> dict[str, str]:
    """The interface on which ranks listen: loopback on a single machine."""
    route = loopback_route() if nodes.count == 1 else find_route(nodes.address, nodes.port)
    return _unset(route.env)


def _unset(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that the user has not set."""
    return {name: text for name, text in variables.items() if name not in os.environ}


def _secret(nodes: Nodes) -> dict[str, str]:
    """A secret for the ranks of one node; several nodes use the one that the user has set."""
    return {SECRET: fresh_secret()} if nodes.count == 1 and SECRET not in os.environ else {}


def _check_xla() -> None:
    """Refuse if this process uses the TPU, which then belongs to it until it exits."""
    core = getattr(sys.modules.get("torch_xla"), "_XLAC", None)
    if core is not None and core._xla_runtime_is_initialized():
        raise LaunchError(
            "launch: XLA is initialized in this process, which then owns the TPU, so no rank could "
            "use it. Restart this session, and use XLA only inside the function."
        )


def _check(fn: Any, args: Any, ranks: Any, timeout_s: Any) -> None:
    if not callable(fn):
        raise LaunchError(
            f"launch takes a function and its arguments, found a {type(fn).__name__}. "
            f"For example: fx.launch(train, (0.1,), ranks=2), not fx.launch(train(0.1), ranks=2)."
        )
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise LaunchError(
            f"launch(args={args!r}): args must be a tuple. For one argument: args=({args!r},)."
        )
    check_ranks(ranks, said="launch(ranks")
    check_seconds(timeout_s, said="launch(timeout_s")


def _results(
    started: list[Rank],
    limit: tuple[float | None, float | None],
    elsewhere: Callable[[], str] | None,
) -> list[Any] | str:
    """Every rank's value by rank, or the error of the one that failed first."""
    deadline, timeout_s = limit
    outcomes: dict[int, tuple[Any] | Failure] = {}
    ready: set[int] = set()
    failures: list[Failure] = []
    while len(outcomes) < len(started):
        waiting: dict[Any, Rank] = {r.pipe: r for r in started if r.number not in outcomes}
        pipes = wait(list(waiting), _pause(deadline, look=elsewhere is not None))
        if not pipes and not failures and (told := elsewhere() if elsewhere else ""):
            return told
        if not pipes and _left(deadline) == 0.0:
            if failures:
                break
            raise LaunchError(_timeout_error(waiting.values(), len(started), timeout_s))
        for rank in [waiting[pipe] for pipe in pipes]:
            outcome = _receive(rank, ready)
            if outcome is None:
                ready.add(rank.number)
                continue
            outcomes[rank.number] = outcome
            if isinstance(outcome, Failure):
                failures.append(outcome)
                soon = time.monotonic() + _GRACE_S
                deadline = soon if deadline is None else min(soon, deadline)
    if failures:
        return describe(LaunchResult(ranks=started[0].world, failures=by_cause(failures)))
    return [value for rank in started for value in outcomes[rank.number]]  # type: ignore[union-attr]


def _pause(deadline: float | None, *, look: bool) -> float | None:
    """Time until the next check of other nodes, or the end."""
    left = _left(deadline)
    return left if not look else _POLL_INTERVAL_S if left is None else min(left, _POLL_INTERVAL_S)


def _receive(rank: Rank, ready: set[int]) -> tuple[Any] | Failure | None:
    """A rank's value, in a tuple of one; its failure; or None if it is not ready."""
    try:
        sent = rank.pipe.recv_bytes()
    except (EOFError, OSError):  # it exited without an answer
        rank.process.join(_GRACE_S)
        code = rank.process.exitcode
        error = "" if rank.number in ready or (code or 0) < 0 else _NOT_STARTED
        return Failure(rank=rank.place, code=code, error=error, time_ns=time.time_ns())
    return unpack(sent) if sent else None


def _timeout_error(late: Iterable[Rank], ranks: int, timeout_s: float | None) -> str:
    names = ", ".join(str(rank.place) for rank in late)
    return (
        f"launch(timeout_s={timeout_s:g}): these of {ranks} ranks did not finish in time and were "
        f"ended: {names}. Find out what they wait for, or allow more time."
    )


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
