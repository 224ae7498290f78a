"""Messages between pairs of ranks, by which they exchange what they have in few rounds.

gloo's own collectives send around a ring, where N ranks wait for each other N - 1 times, each in a
thread of the group. A message arrives in the thread that waits for it.
"""

from __future__ import annotations

import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from fxtrain.ops.transport.rounds import MessageRound, combine_rounds, gather_rounds

_TORCH: Any = torch._C  # parts of it have no type stubs
_TAG = 1000  # of the first round: others send with small ones in the group of an axis


def plain_bytes(memory: bytearray, rows: int) -> Tensor:
    """The memory as uint8, (rows, bytes), which any code may read and write."""
    # Its values are read, also in a dry run, and overwritten, also after inference.
    with _disable_current_modes(), torch.inference_mode(mode=False):
        return torch.frombuffer(memory, dtype=torch.uint8).view(rows, -1)


def profiles() -> bool:
    """Whether torch's profiler records what this thread does."""
    return _TORCH._autograd._profiler_enabled()


def unrecorded(start: Callable[..., dist.Work], *args: object) -> dist.Work:
    """Start something of a group that torch's profiler does not record.

    It may be in flight when a profiler stops. An event of gloo that ends after that is written
    into freed memory (torch 2.13): docs/profiling.md.
    """
    if not profiles():
        return start(*args)
    record = _TORCH._autograd._enable_record_function
    record(False)  # noqa: FBT003 - torch takes no keyword
    try:
        return start(*args)
    finally:
        record(True)  # noqa: FBT003


def remaining(until: float) -> timedelta:
    """The time until a moment of the monotonic clock, as torch's waits take it."""
    return timedelta(seconds=max(until - time.monotonic(), 0.001))


@attrs.define(eq=False, kw_only=True)
class Messages:
    """The messages of one rank, round after round. It is mutable.

    An interrupt leaves it as it is, and the next `wait` continues: nothing is sent twice.

    Attributes:
        group: The process group, in which one thread at a time sends.
        rounds: What is sent and received in each.
        rows: The memory of both, uint8, (rows, bytes); not used for anything else meanwhile.
        arrived: Called after each round with its number; a second time after an interrupt.
    """

    group: Any
    rounds: Sequence[MessageRound]
    rows: Tensor
    arrived: Callable[[int], None] | None = None
    _done: int = 0
    _sent: list[dist.Work | None] = attrs.field(factory=list[Any])
    _received: list[dist.Work | None] = attrs.field(factory=list[Any])

    def wait(self, timeout: timedelta) -> None:
        """Send and receive what is left.

        Raises:
            RuntimeError: a message has not arrived within this time.
        """
        until = time.monotonic() + timeout.total_seconds()
        while self._done < len(self.rounds):
            now = self.rounds[self._done]
            # gloo sends what the other rank is known to wait for without asking it first.
            self._start(self._received, self.group.recv, now.source, now.received)
            self._start(self._sent, self.group.send, now.to, now.sent)
            _wait(self._received[self._done], until)
            if self.arrived is not None:
                self.arrived(self._done)
            self._done += 1
        for work in self._sent:  # a row that was sent may be overwritten only then
            _wait(work, until)

    def _start(
        self,
        works: list[dist.Work | None],
        start: Callable[..., dist.Work],
        other: int | None,
        rows: tuple[int, int],
    ) -> None:
        """Start the message of this round, unless that was done before an interrupt."""
        if len(works) > self._done:
            return
        if other is None:
            works.append(None)
            return
        start = start if not profiles() else partial(unrecorded, start)
        # One call of C, within which Python answers no signal.
        works.extend(map(start, [[self.rows[slice(*rows)]]], [other], [_TAG + self._done]))


def _wait(work: dist.Work | None, until: float) -> None:
    """Wait for a message, once."""
    if work is not None and not work.is_completed():
        work.wait(remaining(until))


def connect_ranks(group: Any, rank: int, ranks: int, timeout: timedelta) -> None:
    """Wait until all ranks of a group have called this, and connect with those of `combine_rounds`.

    Raises:
        RuntimeError: a rank is not reached within this time.
    """
    rounds = combine_rounds(rank, ranks)
    rows = plain_bytes(bytearray(2 * len(rounds) + 1), 2 * len(rounds) + 1)
    Messages(group=group, rounds=rounds, rows=rows).wait(timeout)


class BackgroundWork:
    """Something that waits for other ranks in a thread, while this one continues.

    Args:
        thread: Where it runs, once `start` is called.
        run: What waits.
    """

    def __init__(self, thread: BackgroundThread, run: Callable[[], None]) -> None:
        self._thread, self._run = thread, run
        self._ended = threading.Event()
        self._error: Exception | None = None

    def start(self) -> None:
        """Run it, unless it has run."""
        self._thread.jobs.put(self)

    def run(self) -> None:
        """What the thread calls."""
        if self._ended.is_set():
            return
        try:
            self._run()
        except Exception as error:  # any error: `wait` raises it
            self._error = error
        self._ended.set()

    def wait(self, timeout: timedelta) -> None:
        """Wait until it has ended, and raise its error."""
        self.start()  # which an interrupt may have prevented
        if not self._ended.wait(timeout.total_seconds()):
            raise RuntimeError(f"Timed out after {timeout.total_seconds():.3g} s (gloo).")
        if self._error is not None:
            raise self._error


class BackgroundThread:
    """A thread that runs `BackgroundWork`, in the order in which it was started."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[BackgroundWork | None] = queue.SimpleQueue()
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="fxtrain-deferred", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            self._busy = True
            job.run()
            self._busy = False

    def stop(self) -> None:
        """End the thread: now, or once what it runs has ended, which may be at the timeout."""
        self.jobs.put(None)
        if not self._busy:
            self._thread.join()


class CallSummary(NamedTuple):
    """What the ranks learn of their calls from each other, equal on all of them.

    Attributes:
        differ: Whether ranks made different calls, or one after other numbers of updates.
        deferred: Whether a rank did not wait for the others.
        largest: Bytes of the longest payload.
        same: Whether the values that many ranks compare beside the call are equal.
        sizes: Those of each rank's payload, by rank; empty where they follow with the payloads.
        micros: By rank, the mean of its pace; empty if it was not sent.
        shown: By rank, what it tells of its call; empty if that was not sent.
    """

    differ: bool
    deferred: bool
    largest: int
    same: bool = True
    sizes: Sequence[int] = ()
    micros: Sequence[int] = ()
    shown: Sequence[str] = ()


# Digests of the call and of a value, whether each differs, bytes of the longest payload, the lowest
# pace, and of ranks that do not wait the lowest and highest number of updates.
_HEAD = struct.Struct("<16s16s??QIii2x")
_COMBINED = (any, any, max, min, min, max)  # all but the digests
_MICROS = struct.Struct("<I")
WAITED = -1  # in place of a number of updates, of a rank that waits
_NONE = 2**31 - 1
SHOWN = 64  # bytes of text


class Comparison:
    """Comparing a call between many ranks: a head that combines theirs is sent in all rounds.

    What each rank tells follows only where it is needed: that of calls which differ, if a rank may
    wait for its device instead of the others, and the pace of all ranks once each has a new one.

    Args:
        group: The control group, and this rank and the number of ranks in it.
        digest: Of the call.
        value: The digest of a value that is compared too, without an error; or nothing.
        size: Bytes of this rank's payload.
        micros: The mean of this rank's pace, if it is new; otherwise 0.
        passed: Updates since the last call, or `WAITED`.
        text: What is shown of the call.
        simulated: The ranks are those of torch's fake backend.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        ranks: int,
        *,
        digest: bytes,
        value: bytes,
        size: int,
        micros: int,
        passed: int,
        text: bytes,
        simulated: bool,
    ) -> None:
        self._place = (group, rank, ranks)
        self._simulated = simulated
        self._own = text.ljust(SHOWN), _MICROS.pack(micros)
        self._rounds = combine_rounds(rank, ranks)
        self._end = len(self._rounds)  # the row that combines all ranks
        low = _NONE if passed == WAITED else passed
        head = _HEAD.pack(digest, value, False, False, size, micros, low, passed)  # noqa: FBT003
        self._memory = bytearray(head * (2 * self._end + 1 if simulated else 1))
        self._memory.extend(bytes(_HEAD.size * (2 * self._end + 1) - len(self._memory)))
        rows = plain_bytes(self._memory, 2 * self._end + 1)
        self._heads = Messages(group=group, rounds=self._rounds, rows=rows, arrived=self._combine)
        self._more: tuple[Messages, bytearray] | None = None
        self.summary: CallSummary | None = None

    def wait(self, timeout: timedelta) -> None:
        """Take part until this rank knows what all call."""
        until = time.monotonic() + timeout.total_seconds()
        self._heads.wait(timeout)
        _, _, differ, others, largest, micros, low, high = self._head(self._end)
        deferred = high != WAITED
        differ = differ or (deferred and low != high)
        texts = differ and deferred
        each: list[bytes] = []
        if texts or (micros and not differ):
            each = self._of_all(self._own[0 if texts else 1], until)
        self.summary = CallSummary(
            differ=differ,
            deferred=deferred,
            largest=largest,
            same=not others,
            micros=[] if texts else [_MICROS.unpack(own)[0] for own in each],
            shown=[own.decode(errors="ignore").rstrip() for own in each] if texts else [],
        )

    def _combine(self, number: int) -> None:
        call, value, *first = self._head(number)
        other_call, other_value, *second = self._head(self._end + 1 + number)
        both = zip(first, second, strict=True)
        calls, values, size, micros, low, high = (
            combine(pair) for combine, pair in zip(_COMBINED, both, strict=True)
        )
        calls, values = calls or call != other_call, values or value != other_value
        at = (number + 1) * _HEAD.size
        _HEAD.pack_into(self._memory, at, call, value, calls, values, size, micros, low, high)

    def _head(self, row: int) -> tuple[Any, ...]:
        return _HEAD.unpack_from(self._memory, row * _HEAD.size)

    def _of_all(self, own: bytes, until: float) -> list[bytes]:
        """As many bytes of each rank, by rank."""
        group, rank, ranks = self._place
        if self._more is None:
            memory = bytearray(own * (ranks if self._simulated else 1))
            memory.extend(bytes(len(own) * ranks - len(memory)))
            rows = plain_bytes(memory, ranks)
            messages = Messages(group=group, rounds=gather_rounds(rank, ranks), rows=rows)
            self._more = messages, memory
        messages, memory = self._more
        messages.wait(remaining(until))
        places = [(other - rank) % ranks * len(own) for other in range(ranks)]
        return [bytes(memory[at : at + len(own)]) for at in places]
