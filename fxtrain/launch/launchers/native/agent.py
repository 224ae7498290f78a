"""torch's elastic agent, which here knows how the agents of other nodes end; imports torch.

torch's own agent waits up to five minutes for the others after its ranks have succeeded, also where
another agent was stopped or lost its machine, and says nothing about ranks that it starts again.
"""

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
)

from fxtrain.launch.launchers.native.network import FAREWELL, FAREWELL_S
from fxtrain.launch.launchers.native.rendezvous import BACKEND, open_handler, say
from fxtrain.ops.closing import within
from fxtrain.ops.rendezvous_store import first_line

_HEARTBEAT_INTERVAL_S = 1.0
_SILENT_S = 10.0  # after which a node that sends no heartbeat is considered lost
_POLL_INTERVAL_S = 0.1
# Fields of torch's records that older versions lack.
_NEWER = ("duplicate_stdout_filters", "duplicate_stderr_filters", "virtual_local_rank")


class LostRendezvousError(RendezvousError):
    """The rendezvous does not answer any more, so the ranks cannot start again."""


def run_agent(
    config: Any,
    program: Any,
    arguments: list[Any],
    *,
    serves: bool,
    tell_attempt: Callable[[int, dict[int, int]], None],
) -> RunResult:
    """Start the ranks of this node and wait until they and those of other nodes have ended.

    Args:
        config: torch's `LaunchConfig`, with the settings of our rendezvous.
        program: What each rank runs.
        arguments: Its arguments.
        serves: Whether this process serves the store, and therefore leaves last.
        tell_attempt: Called with the number of an attempt that failed, and with the exit codes of
            the ranks of this node that did, before the next one.

    Raises:
        SignalException: this process was told to end.
        LostRendezvousError: the machine that serves the rendezvous was lost.
        RendezvousError: not all nodes have joined.
    """
    handler = open_handler(
        RendezvousParameters(
            backend=BACKEND,
            endpoint=config.rdzv_endpoint,
            run_id=config.run_id,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            local_addr=config.local_addr,
            **config.rdzv_configs,
        )
    )
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=program,
        args=tuple(arguments),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        **{name: getattr(config, name) for name in _NEWER if hasattr(config, name)},
    )
    timeout = {"shutdown_timeout": config.shutdown_timeout} if _has_timeout(config) else {}
    agent = _Agent(
        spec,
        config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        **timeout,
    )
    agent.serves, agent.tell_attempt = serves, tell_attempt
    return agent.run_and_leave()


def _has_timeout(config: Any) -> bool:
    return hasattr(config, "shutdown_timeout")


class _Agent(LocalElasticAgent):
    serves: bool
    tell_attempt: Callable[[int, dict[int, int]], None]
    _failures: dict[int, Any]

    def run_and_leave(self) -> RunResult:
        """Run to the end; the other nodes learn how this one ended."""
        reason, stopped = "ended with an error", False
        try:
            result: Any = self.run()
            reason = "has a rank that failed" if result.is_failed() else ""
            return result
        except SignalException as error:
            reason, stopped = f"was stopped by {error.sigval.name}", True
            raise
        finally:
            # Beside what the launcher does next, which is to show the error.
            farewell = threading.Thread(
                target=self._farewell, args=(reason, stopped), name=FAREWELL, daemon=True
            )
            farewell.start()
            atexit.register(farewell.join, FAREWELL_S)

    def _farewell(self, reason: str, stopped: bool) -> None:  # noqa: FBT001 - internal
        if self._store is not None:
            leave = _Leave(self._store, self._worker_group.group_rank or 0, self.serves)
            leave.tell(reason)
            if self.serves and reason and not stopped:
                within(FAREWELL_S, lambda: leave.wait(self._worker_group.group_world_size))
        if not stopped:  # a node that was stopped may be replaced
            self._rdzv_handler.shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        look: Any = super()._monitor_workers
        result: RunResult = look(worker_group)
        self._failures = result.failures
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # Called with one restart less left after a failure, and with as many for new nodes.
        spec = worker_group.spec
        if worker_group.state.name != "HEALTHY":
            attempt = spec.max_restarts - self._remaining_restarts - 1
            self.tell_attempt(attempt, {r: f.exitcode for r, f in self._failures.items()})
        restart: Any = super()._restart_workers  # decorated without types
        try:
            restart(worker_group)
        except (RendezvousConnectionError, DistNetworkError) as error:
            raise LostRendezvousError(first_line(error)) from error

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        join: Any = super()._rendezvous
        join(worker_group)
        if not self.serves and worker_group.group_rank is not None:
            _start_heartbeats(self._store, worker_group.group_rank)

    def _exit_barrier(self) -> None:
        group = self._worker_group
        leave = _Leave(self._store, group.group_rank or 0, self.serves)
        try:
            leave.tell("")
            if self.serves:
                leave.wait(group.group_world_size or 1)
        except RuntimeError as error:  # of the store: the node that serves it has ended
            say(f"The main node ended before this one: {str(error).splitlines()[0]}")


@attrs.frozen
class _Leave:
    """The end of a node: it tells the others, and the one that serves the store leaves last."""

    store: Any
    node: int
    serves: bool

    def tell(self, reason: str) -> None:
        with contextlib.suppress(RuntimeError):  # the node that serves the store has ended
            self.store.set(f"ended/{self.node}", reason)

    def wait(self, count: int | None) -> None:
        wait_for_nodes(self.store, [n for n in range(count or 1) if n != self.node])


def wait_for_nodes(store: Any, nodes: list[int]) -> None:
    """Wait until nodes have ended, or are no longer heard of.

    Effects:
        Writes a line to standard error for each node that ended otherwise than by success.
    """
    beats = {node: (-1, time.monotonic()) for node in nodes}
    while beats:
        for node, (seen, since) in [*beats.items()]:
            beat, now = store.add(f"alive/{node}", 0), time.monotonic()
            if store.check([f"ended/{node}"]):
                if reason := store.get(f"ended/{node}").decode():
                    say(f"Node {node} {reason}.")
                del beats[node]
            elif beat != seen:
                beats[node] = beat, now
            elif now - since > _SILENT_S:
                say(
                    f"Node {node} sent nothing for {_SILENT_S:.0f} s, so this node does not wait "
                    f"for it: its launcher or machine ended, or the network between them is down."
                )
                del beats[node]
        time.sleep(_POLL_INTERVAL_S)


def _start_heartbeats(store: Any, node: int) -> None:
    """Count up in the store to the end of this process."""
    if not hasattr(store, "clone"):  # torch 2.9: calls of this thread would block the agent's
        return
    own = store.clone()

    def beat() -> None:
        try:
            while True:
                own.add(f"alive/{node}", 1)
                time.sleep(_HEARTBEAT_INTERVAL_S)
        except RuntimeError:
            return  # the node that serves the store has ended

    threading.Thread(target=beat, name="fxtrain heartbeats", daemon=True).start()
