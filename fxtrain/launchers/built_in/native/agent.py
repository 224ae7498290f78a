"""torch's elastic agent, which here knows how the agents of other nodes end; imports torch.

torch's own agent waits up to five minutes for the others after its ranks have succeeded, also where
another agent was stopped or lost its machine, and says nothing about ranks that it starts again.
"""

import atexit
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

import attrs
from torch.distributed import DistError, DistNetworkError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
)

from fxtrain.errors import LaunchError
from fxtrain.launchers.built_in.native.elastic import FAREWELL, FAREWELL_S
from fxtrain.launchers.built_in.native.node_ends import NodeEnd, NodeEnds
from fxtrain.launchers.built_in.native.rendezvous import BACKEND, open_handler, say
from fxtrain.launchers.outcome import (
    LaunchResult,
    by_cause,
    count_memory_kills,
    describe,
    distance,
    one_line,
    read_reports,
    tell_memory_kills,
    to_failures,
)
from fxtrain.launchers.spec import LaunchSpec
from fxtrain.ops.rendezvous_store import first_line

_FAILURES = 2  # in a row, of ranks of one node, after which it leaves the run
_WAITING_S = 20.0  # for nodes that start their ranks again to be seen waiting
_MAIN_LOST = (
    "The launcher that serves the store of this run ended before this one, or does not answer, so "
    "it is not known whether the ranks of other nodes succeeded."
)
# Fields of torch's records that older versions lack.
_NEWER = ("duplicate_stdout_filters", "duplicate_stderr_filters", "virtual_local_rank")


class _LeavesError(Exception):
    """Ranks of this node failed again and again, and the others go on without it."""

    def __init__(self, ending: LaunchResult) -> None:
        super().__init__()
        self.ending = ending


class LostRendezvousError(RendezvousError):
    """The rendezvous does not answer any more, so the ranks cannot start again."""


def run_agent(
    launch: LaunchSpec,
    config: Any,
    command: tuple[Any, ...],
    logs: Path,
    serves: bool,  # noqa: FBT001 - internal
    deadline: float | None,
) -> LaunchResult:
    """Start the ranks of this node and wait until they and those of other nodes have ended.

    `config` is torch's `LaunchConfig`, with the settings of our rendezvous. A node that serves the
    store leaves last. At the deadline, on the monotonic clock, the ranks are ended.

    Raises:
        LaunchError: not all nodes have joined, or the machine that serves the rendezvous was lost.
        TimeoutError: the ranks did not finish before the deadline.
    """
    start = time.monotonic()
    try:
        agent = _make_agent(config, command)
        agent.launch, agent.logs, agent.serves, agent.deadline = launch, logs, serves, deadline
        agent.begun, agent.kills = time.time(), count_memory_kills()
        return agent.run_and_leave()
    except SignalException as error:
        return LaunchResult(ranks=launch.world_size, signal=int(error.sigval))
    except LostRendezvousError as error:
        raise LaunchError(
            f"The rendezvous at {config.rdzv_endpoint} was lost during the run, so the ranks of "
            f"this node cannot start again: {error} The machine that serves it, its launcher or "
            f"the network to it failed. Start the run again on every node; it continues with the "
            f"last checkpoint.",
            code="FX701",
        ) from error
    except (RendezvousError, DistError) as error:
        raise LaunchError(
            f"Node {launch.node_rank} of {launch.nodes} waited {time.monotonic() - start:.0f} s at "
            f"{config.rdzv_endpoint}, but not all nodes joined: "
            f"{first_line(error.__cause__ or error)} Check that every node was started with the "
            f"same main address, port, number of nodes and run_id."
        ) from error


def _make_agent(config: Any, command: tuple[Any, ...]) -> "_Agent":
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
        entrypoint=command[0],
        args=command[1:],
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        **{name: getattr(config, name) for name in _NEWER if hasattr(config, name)},
    )
    has_timeout = hasattr(config, "shutdown_timeout")
    timeout = {"shutdown_timeout": config.shutdown_timeout} if has_timeout else {}
    return _Agent(
        spec,
        config.logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        **timeout,
    )


class _Agent(LocalElasticAgent):
    launch: LaunchSpec
    logs: Path
    serves: bool
    deadline: float | None
    begun: float  # in seconds since 1970
    kills: int | None  # by the kernel's out-of-memory killer, until then
    _failures: dict[int, Any]
    _in_a_row: int = 0  # attempts that failed since ranks of this node did
    _ends: NodeEnds | None = None
    _culprit: str | None = ""
    _stopped_at: float | None = None

    @property
    def elastic(self) -> bool:
        """Whether nodes join and leave."""
        return self.launch.nodes > 1 and self.launch.meets == "c10d"

    def run_and_leave(self) -> LaunchResult:
        """Run to the end; the other nodes learn how this one ended."""
        end, closes = NodeEnd(text="ended with an error"), True
        try:
            result: Any = self.run()
            end = None  # the others know
            if not result.is_failed():
                return LaunchResult(ranks=self.launch.world_size, culprit=self._culprit or "")
            return self._told(self._ended(result.failures))
        except SignalException as error:
            # A node that was stopped may be replaced, so the rendezvous stays open.
            end, closes = NodeEnd(text=f"was stopped by {error.sigval.name}.", stopped=True), False
            raise
        except _LeavesError as error:
            end, closes = None, False
            return error.ending
        except LostRendezvousError as error:
            if isinstance(error.__cause__, RendezvousConnectionError):  # nobody can be told
                self._ends, closes = None, False
            raise
        except Exception as error:
            end = NodeEnd(text=f"ended with an error: {first_line(error)}")
            raise
        finally:
            # Beside what the launcher does next, which is to show the error.
            farewell = threading.Thread(
                target=self._farewell, args=(end, closes), name=FAREWELL, daemon=True
            )
            farewell.start()
            atexit.register(farewell.join, FAREWELL_S)

    def _ended(self, failures: dict[int, Any]) -> LaunchResult:
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        reports = read_reports(_last_attempt(self.logs, since=self.begun)) if codes else {}
        return LaunchResult(
            ranks=self.launch.world_size,
            failures=by_cause(to_failures(codes, reports)),
            node=self._ends.name if self._ends else "",
            memory=tell_memory_kills(self.kills),
        )

    def _told(self, ending: LaunchResult) -> LaunchResult:
        if self._ends is None or self._ends.count == 1:
            return ending
        first = ending.failures[0]
        mine = NodeEnd(text=one_line(first, ending), distance=distance(first))
        if (culprit := self._ends.culprit_of(mine)) is None:
            self._ends = None
        return attrs.evolve(ending, culprit=culprit or "")

    def _farewell(self, end: NodeEnd | None, closes: bool) -> None:  # noqa: FBT001 - internal
        if self._ends is not None:
            with contextlib.suppress(RuntimeError):  # the node that serves the store has ended
                if end is not None:
                    name = self._ends.name[:1].upper() + self._ends.name[1:]
                    self._ends.tell(attrs.evolve(end, text=f"{name} {end.text}"))
                self._ends.leave()
        if closes:
            self._rdzv_handler.shutdown()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        look: Any = super()._monitor_workers
        result: RunResult = look(worker_group)
        self._failures = result.failures
        running = result.state is WorkerState.HEALTHY
        if running and self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeoutError("The ranks did not finish in time.")
        if self.elastic and result.state is WorkerState.SUCCEEDED and self._starts_again():
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _nodes_wait(self) -> bool:
        """Whether nodes wait to join, such as a launcher that was killed and started again."""
        with contextlib.suppress(RendezvousError):
            return self._rdzv_handler.num_nodes_waiting() > 0
        return False

    def _starts_again(self) -> bool:
        """Whether ranks that ended well only stopped since those of another node start again.

        A script that saves and stops at SIGTERM does so on all ranks, also where only one node got
        it, or lost its launcher. The agent starts them again once it sees that nodes wait; if none
        does, its ranks have ended.
        """
        if self._stopped_at is None and self._ends and self._ends.interrupted():
            self._stopped_at = time.monotonic()
        if self._stopped_at is not None and time.monotonic() - self._stopped_at < _WAITING_S:
            return True
        self._culprit = self._ends.wait(self._nodes_wait) if self._ends else ""
        return self._culprit is not None and self._nodes_wait()

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        # Called with one restart less left after a failure, and with as many for new nodes.
        spec = worker_group.spec
        if worker_group.state.name != "HEALTHY":
            attempt = spec.max_restarts - self._remaining_restarts - 1
            ending = self._ended(self._failures)
            if self.elastic:  # where numbered nodes start their ranks again, each does by itself
                ending = self._told(ending)
            self._in_a_row = 0 if ending.culprit or self._ends is None else self._in_a_row + 1
            if self._ends and self._can_leave():
                say(
                    f"{self._ends.name[:1].upper()}{self._ends.name[1:]} leaves the run: its ranks "
                    f"failed {_FAILURES} times in a row, and enough other nodes remain."
                )
                self._ends.interrupt()
                raise _LeavesError(ending)
            why = describe(ending) if ending.failures else "A rank of another node ended."
            left = self.launch.restarts - attempt
            say(f"Attempt {attempt + 1} failed; {left} more to come. {why}")
        elif self._ends:
            why = self._ends.told()
            self._in_a_row = 0 if why else self._in_a_row
            say(f"The ranks of this node start again. {why or 'Nodes join or leave.'}")
        if self.elastic and self._ends:
            self._ends.interrupt()
        restart: Any = super()._restart_workers  # decorated without types
        try:
            restart(worker_group)
        except (RendezvousConnectionError, DistNetworkError) as error:
            raise LostRendezvousError(first_line(error)) from error

    def _can_leave(self) -> bool:
        """Whether ranks of this node failed too often, and enough nodes remain without it.

        The node that serves the rendezvous stays, since the others could not go on without it.
        """
        if not self.elastic or self.serves or not self._ends or self._in_a_row < _FAILURES:
            return False
        handler: Any = self._rdzv_handler
        fewest = self.launch.min_nodes or self.launch.nodes
        return self._ends.count - 1 + handler.nodes_in_reserve() >= fewest

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        join: Any = super()._rendezvous
        join(worker_group)
        count = worker_group.group_world_size or 1
        if self._ends and count < self._ends.count:
            say(f"The run continues with {count} of {self._ends.count} nodes.")
        self._ends = NodeEnds(self._store, worker_group.group_rank or 0, count, self.serves)
        self._ends.begin()
        self._stopped_at = None

    def _exit_barrier(self) -> None:
        if not self.elastic:  # where nodes join and leave, it has waited for the others
            self._culprit = self._ends.wait() if self._ends else ""
        if self._culprit is None:
            self._ends, self._culprit = None, _MAIN_LOST


def _last_attempt(logs: Path, *, since: float) -> list[Path]:
    """Output of the last attempt: folders are RUN/attempt_N/LOCAL_RANK."""
    attempts = [path for path in logs.glob("*/attempt_*") if path.stat().st_mtime >= since - 1]
    if not attempts:
        return []
    last = max(attempts, key=lambda path: (path.stat().st_mtime, int(path.name.split("_")[-1])))
    return sorted(last.glob("*/error.json"))
