"""torch's elastic agent, which here knows how the agents of other nodes end; imports torch.

torch's own agent waits up to five minutes for the others after its ranks have succeeded, also where
another agent was stopped or lost its machine, and says nothing about ranks that it starts again.
"""

import atexit
import contextlib
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
from torch.distributed import DistError, DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
)

from fxtrain.errors import LaunchError
from fxtrain.launchers.built_in.native.elastic import LEAVE_S, LEAVE_THREAD
from fxtrain.launchers.built_in.native.rendezvous import ElasticRendezvous, open_handler, print_note
from fxtrain.launchers.orphans import MARK, end_strays
from fxtrain.launchers.outcome import (
    LaunchResult,
    count_memory_kills,
    describe,
    describe_memory_kills,
    distance,
    find_failures,
    one_line,
)
from fxtrain.launchers.spec import LaunchSpec
from fxtrain.ops.closing import answered
from fxtrain.ops.rendezvous_store import first_line
from fxtrain.state.parsing import parse_json

_HEARTBEAT_INTERVAL_S = 1.0
_SILENT_S = 10.0  # after which a node that sends no heartbeat is considered lost
_REPORT_S = 0.5  # for another node to report that it failed first
_CAUSE_S = 2.0  # for a rank to write why it fails, after a peer that lost it has ended
_POLL_INTERVAL_S = 0.1
_LONGEST_TEXT = 4000
_FAILURES = 2  # in a row, of ranks of one node, after which it leaves the run
_MAIN_LOST = (
    "The launcher that serves the store of this run ended before this one, or does not answer, so "
    "it is not known whether the ranks of other nodes succeeded."
)


@attrs.frozen(kw_only=True)
class NodeEnd:
    """How a node ended.

    Attributes:
        text: What failed or stopped it, with the name of the node; empty if its ranks succeeded.
        distance: That of its first failure, as `outcome.distance` has it.
        stopped: Whether its launcher got a signal to end, which is not a failure of the run.
        number: How many nodes had reported their end when this one did, itself included.
    """

    text: str = ""
    distance: int = 0
    stopped: bool = False
    number: int = 0


@attrs.frozen
class NodeEnds:
    """What the nodes of one attempt report to each other; a single node reports nothing.

    Attributes:
        store: Their store.
        node: This node's number.
        count: Number of nodes.
        serves: Whether this process serves the store, and therefore leaves last.
    """

    store: Any
    node: int
    count: int
    serves: bool

    @property
    def name(self) -> str:
        """This node in messages; empty if it is the only one."""
        return f"node {self.node} ({platform.node()})" if self.count > 1 else ""

    def begin(self) -> None:
        """Report the host, and until the process ends, that this launcher is alive."""
        if self.count > 1:
            self.store.set(f"host/{self.node}", platform.node())
            self.store.delete_key(f"ended/{self.node}")  # of an attempt before
            _start_heartbeats(self.store, self.node)

    def report(self, end: NodeEnd) -> NodeEnd:
        """Report how this node ended; returns the end with its number."""
        end = attrs.evolve(end, text=end.text[:_LONGEST_TEXT], number=self.store.add("ends", 1))
        self.store.set(f"ended/{self.node}", json.dumps(attrs.asdict(end)))
        return end

    def culprit_of(self, local_end: NodeEnd) -> str | None:
        """Report that ranks of this node failed; returns what failed before on another node.

        Returns:
            The other node's text; empty if this node failed first, or if none has reported in time.
            None if the store does not answer.
        """
        if self.count == 1:
            return ""
        return self._asked(2 * _REPORT_S, lambda: self._first(self.report(local_end)))

    def _first(self, local_end: NodeEnd) -> str:
        start = time.monotonic()
        while True:
            others = [end for node in self._others() if (end := self._end_of(node))]
            known = [end for end in others if end.text and end.distance == 0] + [local_end]
            # Of several that only lost a peer, each reports which one.
            first = min(known, key=lambda end: (end.distance, end.number))
            # Nodes that ended before may still be writing their report.
            before = first.number - 1 <= sum(
                end.number < first.number for end in (*others, local_end)
            )
            late = time.monotonic() - start > _REPORT_S
            if (before and first.distance == 0) or late or len(others) == self.count - 1:
                return "" if first is local_end else first.text
            time.sleep(_POLL_INTERVAL_S)

    def wait(self, until: Callable[[], bool] = lambda: False) -> str | None:
        """Report that the ranks of this node succeeded, and wait for those of the others.

        Args:
            until: Ends waiting for nodes that have not ended, such as when another one has come in
                the place of one that was lost.

        Returns:
            What failed on another node; empty if nothing did. None if the store does not answer.

        Effects:
            Writes a line to standard error for each node that was stopped by a signal.
        """
        if self.count == 1:
            return ""
        beats = {node: (-1, time.monotonic()) for node in self._others()}
        ends: dict[int, NodeEnd] = {}
        if not answered(_SILENT_S, lambda: self.report(NodeEnd())):
            return None
        while beats:
            if not answered(_SILENT_S, lambda: self._look(beats, ends)):
                return None
            if beats and until():
                break
            time.sleep(_POLL_INTERVAL_S if beats else 0)
        failed = [end for end in ends.values() if end.text and not end.stopped]
        first = min(failed, key=lambda end: (end.distance, end.number), default=NodeEnd())
        return first.text

    def _look(self, beats: dict[int, tuple[int, float]], ends: dict[int, NodeEnd]) -> None:
        """Move nodes that have ended, or are no longer heard of, from `beats` to `ends`."""
        for node, (seen, since) in [*beats.items()]:
            beat, now = self.store.add(f"alive/{node}", 0), time.monotonic()
            if end := self._end_of(node):
                if end.stopped:
                    print_note(end.text)
                ends[node] = end
            elif beat != seen:
                beats[node] = beat, now
            elif now - since > _SILENT_S:
                host = self.store.get(f"host/{node}").decode()[:_LONGEST_TEXT]
                text = (
                    f"Node {node} ({host}) sent nothing for {_SILENT_S:.0f} s, so this node does "
                    f"not wait for it: its launcher or machine ended, or the network between them "
                    f"is down."
                )
                ends[node] = NodeEnd(text=text, distance=1)
                self.store.set(f"left/{node}", "")  # so that `leave` does not wait for it again
            if node in ends:
                del beats[node]

    def interrupt(self) -> None:
        """Report that ranks of this node are ended to start again."""
        self._asked(_REPORT_S, lambda: self.store.set("interrupted", ""))

    def interrupted(self) -> bool:
        """Whether another node ends its ranks to start them again."""
        return bool(self._asked(_REPORT_S, lambda: self.store.check(["interrupted"])))

    def reported(self) -> str:
        """What other nodes reported of their failures; empty if they reported nothing."""
        ends = self._asked(_REPORT_S, lambda: [*map(self._end_of, self._others())])
        return min((end.text for end in ends or () if end and end.text), default="")

    def _asked(self, patience_s: float, question: Callable[[], Any]) -> Any:
        """The answer of the store; None if there is none in time, or no other node."""
        answers: list[Any] = []
        if self.count > 1:
            answered(patience_s, lambda: answers.append(question()))
        return answers[0] if answers else None

    def leave(self) -> None:
        """End the use of the store; the node that serves it waits `LEAVE_S` for the others."""
        if self.count == 1:
            return
        self.store.set(f"left/{self.node}", "")
        start = time.monotonic()
        while self.serves and time.monotonic() - start < LEAVE_S:
            if all(self.store.check([f"left/{node}"]) for node in self._others()):
                return
            time.sleep(_POLL_INTERVAL_S)

    def _others(self) -> list[int]:
        return [node for node in range(self.count) if node != self.node]

    def _end_of(self, node: int) -> NodeEnd | None:
        """What a node reported; None if it has not ended."""
        if not self.store.check([f"ended/{node}"]):
            return None
        try:
            reported = parse_json(self.store.get(f"ended/{node}"))
            return NodeEnd(
                text=str(reported["text"])[:_LONGEST_TEXT],
                distance=int(reported["distance"]),
                stopped=bool(reported["stopped"]),
                number=int(reported["number"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            text = f"Node {node} reported its end in another format: {error}"
            return NodeEnd(text=text, distance=1)


def _start_heartbeats(store: Any, node: int) -> None:
    """Count up in the store to the end of this process."""
    own = store.clone()  # whose calls do not block the agent's

    def beat() -> None:
        try:
            while True:
                own.add(f"alive/{node}", 1)
                time.sleep(_HEARTBEAT_INTERVAL_S)
        except RuntimeError:
            return  # the node that serves the store has ended

    threading.Thread(target=beat, name="fxtrain heartbeats", daemon=True).start()


# A node before it has joined others, and one that cannot reach them any more.
_ALONE = NodeEnds(None, 0, 1, serves=False)
_CUT_OFF = NodeEnds(None, 0, 1, serves=False)


def run_agent(
    launch: LaunchSpec,
    config: Any,
    program: Any,
    arguments: Sequence[Any],
    listener: socket.socket | None,
    deadline: float | None,
    replace_spares: Callable[[], None],
) -> LaunchResult:
    """Start the ranks of this node and wait until they and those of other nodes have ended.

    `config` is torch's `LaunchConfig`. A node with a `listener` serves the store, and leaves last.
    At the deadline, on the monotonic clock, the ranks are ended.

    Raises:
        LaunchError: not all nodes have joined, or the machine that serves the rendezvous was lost.
        TimeoutError: the ranks did not finish before the deadline.
    """
    start, agent = time.monotonic(), None
    try:
        handler = open_handler(launch, config, listener)
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
        )
        shutdown_s = getattr(config, "shutdown_timeout", None)  # which torch 2.9 lacks
        agent = _Agent(
            spec,
            config.logs_specs,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            **({} if shutdown_s is None else {"shutdown_timeout": shutdown_s}),
        )
        agent.launch, agent.handler, agent.serves = launch, handler, listener is not None
        agent.deadline, agent.replace_spares = deadline, replace_spares
        agent.kills = count_memory_kills()
        return agent.run_and_leave()
    except SignalException as error:
        return LaunchResult(ranks=launch.world_size, signal=int(error.sigval))
    except (RendezvousError, DistError) as error:
        lost = isinstance(error, RendezvousConnectionError | DistNetworkError)
        place, why = config.rdzv_endpoint, first_line(error)
        again = "Start the run again on every node; it continues with the last checkpoint."
        joined_once = agent is not None and agent.joined > 0
        if agent is not None and lost:
            when = "before all nodes had joined"
            if joined_once:
                when = "during the run, so the ranks of this node cannot start again"
            raise LaunchError(
                f"The rendezvous at {place} was lost {when}: {why} The machine that serves it, its "
                f"launcher or the network to it failed. {again}",
                code="FX701",
            ) from error
        if joined_once:
            text = f"The ranks of this node cannot start again: {why} {again}"
            raise LaunchError(text) from error
        who = "This node" if launch.elastic else f"Node {launch.node_rank} of {launch.nodes}"
        raise LaunchError(
            f"{who} waited {time.monotonic() - start:.0f} s at {place}, but not all nodes joined: "
            f"{why} Check that every node was started with the same main address, port, number of "
            f"nodes and run_id."
        ) from error


class _Agent(LocalElasticAgent):
    launch: LaunchSpec
    handler: Any
    serves: bool
    deadline: float | None
    replace_spares: Callable[[], None]
    kills: int | None  # by the kernel's out-of-memory killer, until then
    _failures: dict[int, Any]
    _stopped: tuple[int, ...] = ()  # ranks that were running when another one failed
    joined: int = 0  # how often the nodes have joined
    _joined: bool = False  # whether they have, for this attempt
    _in_a_row: int = 0  # attempts that failed since ranks of this node did
    _left: LaunchResult | None = None  # how this node ended, if the others go on without it
    _ends: NodeEnds = _ALONE
    _culprit: str | None = ""
    _succeeded: bool = False  # whether the ranks of all nodes have
    _stopped_at: float | None = None

    def run_and_leave(self) -> LaunchResult:
        """Run to the end; the other nodes learn how this one ended."""
        end, closes = NodeEnd(text="ended with an error"), True
        try:
            result: Any = self.run()
            end = None  # the others know
            if self._left is not None:
                closes = False
                return self._left
            if result is None:  # it stood by until the run ended
                closes = False
                return LaunchResult(ranks=self.launch.world_size)
            if not result.is_failed():
                self._succeeded = not self._culprit
                return LaunchResult(ranks=self.launch.world_size, culprit=self._culprit or "")
            return self._report_end(self._ended(result.failures))
        except SignalException as error:
            # A node that was stopped may be replaced, so the rendezvous stays open.
            end, closes = NodeEnd(text=f"was stopped by {error.sigval.name}.", stopped=True), False
            raise
        except RendezvousConnectionError:  # no node can be reached
            self._ends, closes = _CUT_OFF, False
            raise
        except Exception as error:
            end = NodeEnd(text=f"ended with an error: {first_line(error)}")
            raise
        finally:
            # Beside what the launcher does next, which is to show the error.
            leaving = threading.Thread(
                target=self._leave, args=(end, closes), name=LEAVE_THREAD, daemon=True
            )
            leaving.start()
            atexit.register(leaving.join, LEAVE_S)

    def _ended(self, failures: dict[int, Any]) -> LaunchResult:
        codes = {rank: failure.exitcode for rank, failure in failures.items()}
        files = self._pcontext.error_files.values() if codes and self._pcontext else ()
        return LaunchResult(
            ranks=self.launch.world_size,
            failures=find_failures(
                codes, (path for path in map(Path, files) if path.exists()), stopped=self._stopped
            ),
            node=self._ends.name,
            memory=describe_memory_kills(self.kills),
        )

    def _report_end(self, ending: LaunchResult) -> LaunchResult:
        first = ending.failures[0]
        end = NodeEnd(text=one_line(first, ending), distance=distance(first))
        if (culprit := self._ends.culprit_of(end)) is None:
            self._ends = _CUT_OFF
        return attrs.evolve(ending, culprit=culprit or "")

    def _leave(self, end: NodeEnd | None, closes: bool) -> None:  # noqa: FBT001 - internal
        with contextlib.suppress(RuntimeError):  # the node that serves the store has ended
            if end is not None and self._ends.count > 1:
                self._ends.report(attrs.evolve(end, text=f"N{self._ends.name[1:]} {end.text}"))
            self._ends.leave()
        elastic = isinstance(self.handler, ElasticRendezvous) and self._ends is not _CUT_OFF
        with contextlib.suppress(RuntimeError):
            if elastic and self._succeeded:
                self.handler.succeed()
            # A node that has never joined leaves the run to the others, if they can go on.
            if closes and (self.joined or self.serves):
                self.handler.shutdown()
            elif not closes and self._joined and not self.serves and elastic:
                self.handler.leave()
            if elastic:
                # Launchers that stand by, or are on their way to, learn that the run has ended.
                self.handler.end(LEAVE_S if closes and self.serves else 0.0)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._end_after_failure(worker_group)
        look: Any = super()._monitor_workers
        result: RunResult = look(worker_group)
        self._failures = result.failures
        self.replace_spares()
        running = result.state is WorkerState.HEALTHY
        if running and self.deadline is not None and time.monotonic() > self.deadline:
            raise TimeoutError("The ranks did not finish in time.")
        if self.launch.elastic and result.state is WorkerState.SUCCEEDED and self._starts_again():
            return RunResult(state=WorkerState.HEALTHY)
        failed = result.state in (WorkerState.UNHEALTHY, WorkerState.FAILED)
        if failed and self._remaining_restarts > 0:
            self._count_failure()
        return result

    def _end_after_failure(self, worker_group: WorkerGroup) -> None:
        """End the other ranks once one has failed, and remember which ones were running.

        torch's agent would give them 30 s, and keep the exit codes only: that of a rank which it
        killed is that of a rank which another program killed.
        """
        context: Any = self._pcontext
        ranks = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
        reports = {rank: Path(context.error_files[local]) for rank, local in ranks.items()}
        since = time.monotonic()
        while True:
            polled = {rank: context.subprocess_handlers[ranks[rank]].proc.poll() for rank in ranks}
            codes = {rank: code for rank, code in polled.items() if code}
            if not codes:
                return
            written = {rank: path for rank, path in reports.items() if path.exists()}
            failures = find_failures(codes, written.values())
            running = [rank for rank in ranks if polled[rank] is None and rank not in written]
            # The peers of a rank that fails may end before it has written why.
            late = time.monotonic() - since > _CAUSE_S
            if not distance(failures[0]) or not running or late:
                break
            time.sleep(_POLL_INTERVAL_S)
        self._stopped = tuple(running)
        context.close(timeout=self.launch.shutdown_s)

    def _stop_workers(self, worker_group: WorkerGroup, *more: Any) -> None:
        """End the ranks to start them again, within the time of the launch."""
        if self._pcontext is not None:
            self._pcontext.close(timeout=self.launch.shutdown_s)
        stop: Any = super()._stop_workers  # which takes more arguments in torch 2.9
        stop(worker_group, *more)

    def _nodes_wait(self) -> bool:
        """Whether nodes wait to join, such as a launcher that was killed and started again."""
        with contextlib.suppress(RendezvousError):
            return self.handler.num_nodes_waiting() > 0
        return False

    def _starts_again(self) -> bool:
        """Whether ranks that ended well only stopped since those of another node start again.

        A script that saves and stops at SIGTERM does so on all ranks, also where only one node got
        it, or lost its launcher. The agent starts them again once it sees that nodes wait; if none
        does, its ranks have ended.
        """
        if self._stopped_at is None and self._ends.interrupted():
            self._stopped_at = time.monotonic()
        if self._stopped_at is not None and self._waits_since(self._stopped_at):
            return True
        self._culprit = self._ends.wait(self._nodes_wait)
        if self._culprit is None:
            return False
        if self._stopped_at is None and self._is_replaced():
            self._stopped_at = time.monotonic()
            return True
        return self._nodes_wait()

    def _waits_since(self, start: float) -> bool:
        """Whether other nodes may still be seen waiting: one stops its ranks, or was lost."""
        with contextlib.suppress(RendezvousError):
            patience_s = self.handler.noticed_s + self.launch.shutdown_s
            return time.monotonic() - start < patience_s and not self.handler.is_closed()
        return False

    def _is_replaced(self) -> bool:
        """Whether another node starts its ranks again, or left and one in reserve replaces it."""
        left = bool(self._culprit or self._ends.reported())
        return self._ends.interrupted() or (left and self.handler.nodes_in_reserve() > 0)

    def _count_failure(self) -> None:
        """Report that ranks failed that start again, or leave the run without a further attempt."""
        attempt = self.launch.restarts - self._remaining_restarts + 1
        ending = self._ended(self._failures)
        if self.launch.elastic:  # numbered nodes start their ranks again each by itself
            self._ends.interrupt()  # first, for nodes that wait for the end of this one
            ending = self._report_end(ending)
        lost = self._ends is _CUT_OFF
        self._in_a_row = 0 if ending.culprit or lost else self._in_a_row + 1
        if self._can_leave():
            print_note(
                f"N{self._ends.name[1:]} leaves the run: its ranks failed {_FAILURES} times in a "
                f"row, and enough other nodes remain."
            )
            self._left, self._remaining_restarts = ending, 0
            return
        why = describe(ending) if ending.failures else "A rank of another node ended."
        print_note(f"Attempt {attempt} failed; {self._remaining_restarts} more to come. {why}")

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is WorkerState.HEALTHY:
            why = self._ends.reported()
            self._in_a_row = 0 if why else self._in_a_row
            print_note(f"The ranks of this node start again. {why or 'Nodes join or leave.'}")
        if self.launch.elastic:
            self._ends.interrupt()
        restart: Any = super()._restart_workers  # decorated without types
        restart(worker_group)

    def _can_leave(self) -> bool:
        """Whether ranks of this node failed too often, and enough nodes remain without it.

        The node that serves the rendezvous stays, since the others could not go on without it.
        """
        if not self.launch.elastic or self.serves or self._in_a_row < _FAILURES:
            return False
        fewest = self.launch.min_nodes or self.launch.nodes
        return self._ends.count - 1 + self.handler.nodes_in_reserve() >= fewest

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        # Remaining children of ranks, before the next attempt starts.
        end_strays(os.environ[MARK], patience_s=self.launch.shutdown_s, ask=True)
        self._joined = False
        try:
            self._join(super()._rendezvous, worker_group)
        except RendezvousClosedError as error:
            why = "another launcher waited in vain for nodes, or failed; its output says why."
            raise RendezvousClosedError(self._ends.reported() or why) from error
        self.joined, self._joined = self.joined + 1, True
        count = worker_group.group_world_size or 1
        if count < self._ends.count:
            print_note(f"The run continues with {count} of {self._ends.count} nodes.")
        self._ends = NodeEnds(self._store, worker_group.group_rank or 0, count, self.serves)
        self._ends.begin()
        self._stopped_at = None

    def _join(self, join: Any, worker_group: WorkerGroup) -> None:
        """Join the nodes, and again where one of them was lost before all knew their ranks."""
        lost_at: float | None = None
        while True:
            try:
                return join(worker_group)
            except DistStoreError:  # the store waited in vain for what that node would write
                lost_at = lost_at or time.monotonic()
                late = time.monotonic() - lost_at > self.launch.connect_timeout_s
                if late or not self.launch.elastic:
                    raise
                print_note(
                    "A node that had joined was lost before its ranks started. All join again."
                )

    def _exit_barrier(self) -> None:
        if not self.launch.elastic:  # where nodes join and leave, it has waited for the others
            self._culprit = self._ends.wait()
        if self._culprit is None:
            self._ends, self._culprit = _CUT_OFF, _MAIN_LOST
