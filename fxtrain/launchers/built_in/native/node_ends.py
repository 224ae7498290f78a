"""How the nodes of a launch end: they tell each other in their store, and name the same culprit."""

import json
import platform
import threading
import time
from collections.abc import Callable
from typing import Any

import attrs

from fxtrain.launchers.built_in.native.elastic import FAREWELL_S
from fxtrain.launchers.built_in.native.rendezvous import say
from fxtrain.ops.closing import answered
from fxtrain.state.parsing import parse_json

_HEARTBEAT_INTERVAL_S = 1.0
_SILENT_S = 10.0  # after which a node that sends no heartbeat is considered lost
_LOOK_S = 0.5  # for another node to tell that it failed first
_POLL_INTERVAL_S = 0.1
_LONGEST_TEXT = 4000


@attrs.frozen(kw_only=True)
class NodeEnd:
    """How a node ended.

    Attributes:
        text: What failed or stopped it, with the name of the node; empty if its ranks succeeded.
        distance: That of its first failure, as `outcome.distance` has it.
        stopped: Whether its launcher got a signal to end, which is not a failure of the run.
        number: How many nodes had told their end when this one did, itself included.
    """

    text: str = ""
    distance: int = 0
    stopped: bool = False
    number: int = 0


def node_name(node: int, host: str) -> str:
    """A node in messages."""
    return f"node {node} ({host})" if host else f"node {node}"


@attrs.frozen
class NodeEnds:
    """What the nodes of one attempt tell each other.

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
        return node_name(self.node, platform.node()) if self.count > 1 else ""

    def begin(self) -> None:
        """Tell the others the host, and that this launcher lives, to the end of the process."""
        if self.count > 1:
            self.store.set(f"host/{self.node}", platform.node())
            self.store.delete_key(f"ended/{self.node}")  # of an attempt before
            _start_heartbeats(self.store, self.node)

    def tell(self, end: NodeEnd) -> NodeEnd:
        """Tell the others how this node ended; the end with its number."""
        end = attrs.evolve(end, text=end.text[:_LONGEST_TEXT], number=self.store.add("ends", 1))
        self.store.set(f"ended/{self.node}", json.dumps(attrs.asdict(end)))
        return end

    def culprit_of(self, mine: NodeEnd) -> str | None:
        """Tell that ranks of this node failed; what failed before on another node.

        Returns:
            The other node's text; empty if this node failed first, or if none has told in time.
            None if the store does not answer.
        """
        firsts: list[str] = []
        answered(2 * _LOOK_S, lambda: firsts.append(self._first(self.tell(mine))))
        return firsts[0] if firsts else None

    def _first(self, mine: NodeEnd) -> str:
        start = time.monotonic()
        while True:
            others = [end for node in self._others() if (end := self._end_of(node))]
            causes = [end for end in others if end.text and end.distance == 0]
            # Nodes that told their end before may still be writing it.
            before = mine.number - 1 <= sum(end.number < mine.number for end in others)
            decided = before if mine.distance == 0 else bool(causes)
            late = time.monotonic() - start > _LOOK_S
            if decided or late or len(others) == self.count - 1:
                break
            time.sleep(_POLL_INTERVAL_S)
        # Of several that only lost a peer, each tells which one.
        first = min([*causes, mine], key=lambda end: (end.distance, end.number))
        return "" if first is mine else first.text

    def wait(self, until: Callable[[], bool] = lambda: False) -> str | None:
        """Tell that the ranks of this node succeeded, and wait for those of the others.

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
        if not answered(_SILENT_S, lambda: self.tell(NodeEnd())):
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
                    say(end.text)
                ends[node] = end
            elif beat != seen:
                beats[node] = beat, now
            elif now - since > _SILENT_S:
                # Under torch 2.9, a node that works sends none either.
                known = hasattr(self.store, "clone")
                ends[node] = NodeEnd(text=self._silent(node), distance=1, stopped=not known)
                if known:  # so that `leave` does not wait for it again
                    self.store.set(f"left/{node}", "")
            if node in ends:
                del beats[node]

    def _silent(self, node: int) -> str:
        host = self.store.get(f"host/{node}").decode()[:_LONGEST_TEXT]
        return (
            f"{node_name(node, host).capitalize()} sent nothing for {_SILENT_S:.0f} s, so this "
            f"node does not wait for it: its launcher or machine ended, or the network between "
            f"them is down."
        )

    def interrupt(self) -> None:
        """Tell the others that ranks of this node are ended to start again."""
        answered(_LOOK_S, lambda: self.store.set("interrupted", ""))

    def interrupted(self) -> bool:
        """Whether another node ends its ranks to start them again."""
        answers: list[bool] = []
        answered(_LOOK_S, lambda: answers.append(self.store.check(["interrupted"])))
        return answers == [True]

    def told(self) -> str:
        """What other nodes told of their failures; empty if they told nothing."""
        ends: list[NodeEnd | None] = []
        answered(_LOOK_S, lambda: ends.extend(map(self._end_of, self._others())))
        return min((end.text for end in ends if end and end.text), default="")

    def leave(self) -> None:
        """End the use of the store; the node that serves it waits `FAREWELL_S` for the others."""
        self.store.set(f"left/{self.node}", "")
        start = time.monotonic()
        while self.serves and time.monotonic() - start < FAREWELL_S:
            if all(self.store.check([f"left/{node}"]) for node in self._others()):
                return
            time.sleep(_POLL_INTERVAL_S)

    def _others(self) -> list[int]:
        return [node for node in range(self.count) if node != self.node]

    def _end_of(self, node: int) -> NodeEnd | None:
        """What a node told; None if it has not ended."""
        if not self.store.check([f"ended/{node}"]):
            return None
        try:
            told = parse_json(self.store.get(f"ended/{node}"))
            return NodeEnd(
                text=str(told["text"])[:_LONGEST_TEXT],
                distance=int(told["distance"]),
                stopped=bool(told["stopped"]),
                number=int(told["number"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            return NodeEnd(text=f"Node {node} told its end in another format: {error}", distance=1)


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
