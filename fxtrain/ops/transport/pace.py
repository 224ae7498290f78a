"""How long each rank computes in a step; it travels in the headers of packets that are sent anyway.

Time in which a rank waits for others is not its own: what is counted is the loop between two steps
without fxtrain's collectives, the loss function where the strategy's forward does not communicate,
and the optimizers. Backward is not counted, since gradients are reduced in it. On a GPU, steps are
sampled with events of the stream in which the model runs, and the loop is not counted, since the
host may wait there for the device.
"""

import collections
import platform
import statistics
import time
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from fxtrain.ops.logs import log
from fxtrain.state import DistContext

KEPT = 32  # steps of which the mean is sent
_DROPPED = 4  # the longest of those, in which a rank may have saved or evaluated
_TIMES = 2  # means in a row after which a rank is named
_FACTOR = 1.5  # by which they exceed the median of all ranks
_LEAST_S = 0.002  # and by how much, beside what scheduling adds to small models
_SAMPLED = 4  # steps on a GPU, of which one is timed


@attrs.define(eq=False)
class Pace:
    """The pace of this rank. It is mutable.

    The communicators of a context and of its axes are opened with the same one, so that collectives
    on each of them count as waiting. A context of one rank has none, and a dry run neither.

    Attributes:
        steps: Seconds of the last steps in which this rank computed.
        waited_s: Time in fxtrain's collectives; only differences mean something.
        micros: Mean of `steps` when it was last complete, in microseconds; 0 before.
        fresh: Whether it has not been compared since.
        slow: On rank 0, by rank, what was reported of the slow ones: a row of a table.
    """

    steps: collections.deque[float] = attrs.field(
        factory=lambda: collections.deque(maxlen=KEPT), repr=False
    )
    waited_s: float = 0.0
    micros: int = 0
    fresh: bool = False
    slow: dict[int, dict[str, Any]] = attrs.field(factory=dict[int, Any])
    _count: int = 0
    _own_s: float = 0.0
    _left: float | None = None  # when the last step ended, less what was waited until then
    _spans: list[tuple[Any, Any]] = attrs.field(factory=list[Any], repr=False)
    _late: list[list[tuple[Any, Any]]] = attrs.field(factory=list[Any], repr=False)
    _over: dict[int, int] = attrs.field(factory=dict[int, int], repr=False)

    def begin(self, device: str) -> None:
        """The loop before a step ends, on this type of device."""
        if device == "cpu":
            now = time.perf_counter() - self.waited_s
            self._own_s = 0.0 if self._left is None else now - self._left

    def now(self, device: str) -> Any:
        """The beginning of a span of computing; None if it is not timed."""
        if device == "cpu":
            return time.perf_counter() - self.waited_s
        if device != "cuda" or self._count % _SAMPLED:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, began: Any, device: str) -> None:
        """The end of a span of computing."""
        if device == "cpu":
            self._own_s += time.perf_counter() - self.waited_s - began
        elif began is not None:
            self._spans.append((began, self.now(device)))

    def end(self, ctx: DistContext) -> None:
        """The step ends.

        Effects:
            The first mean writes host and device of this rank to the store.
        """
        if ctx.device.type == "cpu":
            self.steps.append(self._own_s)
            self._left = time.perf_counter() - self.waited_s
        elif self._spans:
            self._late.append(self._spans)
            self._spans = []
        while self._late and all(last.query() for _, last in self._late[0]):
            spans = self._late.pop(0)
            self.steps.append(sum(first.elapsed_time(last) for first, last in spans) / 1000)
        self._count += 1
        every = KEPT if ctx.device.type == "cpu" else KEPT * _SAMPLED
        if self._count % every == 0 and len(self.steps) == KEPT:
            if not self.micros and ctx.comm.store is not None:
                ctx.comm.store.set(f"pace/{ctx.rank}", f"{ctx.device}\n{platform.node()}")
            kept = sorted(self.steps)[: KEPT - _DROPPED]
            self.micros, self.fresh = max(1, round(1e6 * sum(kept) / len(kept))), True

    def compare(self, ctx: DistContext, micros: Sequence[int]) -> None:
        """Name ranks that are slow, once each.

        Args:
            ctx: The context of all ranks, on rank 0.
            micros: By rank, its mean; 0 if it has none.
        """
        if not all(micros):
            return
        self.fresh = False
        median = statistics.median_low(micros)
        for rank, mean in enumerate(micros):
            over = mean > _FACTOR * median and mean - median > 1e6 * _LEAST_S
            self._over[rank] = self._over.get(rank, 0) + 1 if over else 0
            if self._over[rank] >= _TIMES and rank not in self.slow:
                self._name(ctx, rank, mean / 1e6, median / 1e6)

    def _name(self, ctx: DistContext, rank: int, seconds: float, median: float) -> None:
        device, host = "an unknown device", "an unknown host"
        if ctx.comm.store is not None and ctx.comm.store.check([f"pace/{rank}"]):
            device, host = ctx.comm.store.get(f"pace/{rank}").decode().split("\n")
        self.slow[rank] = {
            "rank": rank,
            "host": host,
            "device": device,
            "ms per step": round(1000 * seconds, 1),
            "median of ranks": round(1000 * median, 1),
        }
        log(ctx, "fxtrain.ranks").warning(
            "Rank %d on %s (%s) computes for %.1f ms in a step, %.1f times the median of %d ranks "
            "(%.1f ms), over the last %d timed steps. The others wait for it. Look for other "
            "programs on this machine, a hot or throttled device, or a slow disk.",
            rank,
            host,
            device,
            1000 * seconds,
            seconds / median,
            ctx.world_size,
            1000 * median,
            _TIMES * KEPT,
        )
