"""The exchange of packets with which every collective starts.

Every collective of fxtrain starts with packets of a fixed size. Since that never depends on the
call, ranks that make different calls can still read each other's packets: all of them raise, and
the communicator stays usable. (gloo aborts the process when sizes differ, so the check must come
first.)

Packets are sent in rounds of messages, as many as the logarithm of the number of ranks. Few ranks
send a header with a digest of the call, then the payload if it fits. A payload that does not fit
follows in an all-gather, once the headers agree. Many ranks combine their headers, and payloads
follow in other rounds, if any rank has one.
"""

import collections
import hashlib
import os
import struct
import threading
import time
from datetime import timedelta
from typing import Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain._display import counted
from fxtrain.errors import CollectiveError
from fxtrain.ops.transport.messages import (
    SHOWN,
    WAITED,
    BackgroundThread,
    BackgroundWork,
    CallSummary,
    Comparison,
    Messages,
    plain_bytes,
    remaining,
)
from fxtrain.ops.transport.mismatches import (
    CallSite,
    call_site,
    deferred_mismatch_error,
    lost_rank_error,
    mismatch_error,
    mismatch_text,
)
from fxtrain.ops.transport.pace import Pace
from fxtrain.ops.transport.payloads import (
    Combine,
    combined,
    from_rank_0,
    ordered,
    repeated,
    send_payloads,
)
from fxtrain.ops.transport.rounds import gather_rounds
from fxtrain.state import DistContext

# Digest, payload length, pace of the rank, updates since the last call if the comparison of this
# one is deferred and -1 otherwise, and what a mismatch shows of a call if no rank can be asked.
_HEADER = struct.Struct("<16sQIi64s")
HEADER = _HEADER.size
_UNIT = 32  # a packet's length is a multiple of it
_FEW = 8  # ranks that send whole packets to each other
_MAX_MICROS = 2**32 - 1
_MAX_PACKET_BYTES = 8192
_RECENT = 8
_MAX_TOTAL_BYTES = 1 << 19  # bytes that arrive at each rank in one exchange, at most
_TORCH: Any = torch._C  # parts of it have no type stubs

# Name of the op; its arguments as text, equal on ranks whose calls match; optionally a third
# text that is only shown if the ranks differ.
Call = tuple[str, str] | tuple[str, str, str]
_DESCRIBE: Call = ("describe a mismatch", "")
EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")  # the payload of a call that sends none


@attrs.define(eq=False)
class Exchange:
    """An exchange in flight.

    Attributes:
        call: What the ranks compare.
        digest: Of the call.
        payload: This rank's, uint8, 1-D, on the CPU.
        work: What sends packets, or the payloads that follow them.
        site: Where the call is made; None to find it when it is needed.
        src: The only rank that has a payload, which all get; None if each may have one.
        root: The only rank that gets the payloads; None if all do.
        combine: How payloads are combined into one; None if they are not.
        comparison: That of many ranks.
        summary: What the ranks have learned of their calls; None before.
        rows: Every rank's payload, uint8, (ranks, the longest), if one does not fit in a packet.
            Those of many ranks begin with their length, and are ordered as `gather_rounds` says;
            or combined, as `reduce_rounds` says.
    """

    call: Call
    digest: bytes
    payload: Tensor
    work: dist.Work | BackgroundWork | Comparison | Messages
    site: CallSite | None = None
    src: int | None = None
    root: int | None = None
    combine: Combine | None = None
    comparison: Comparison | None = None
    summary: CallSummary | None = None
    rows: Tensor | None = None


@attrs.define(eq=False)
class Updates:
    """Optimizer updates of a context's models: where a rank is in its loop.

    Calls are matched by their order. A rank that skips one whose comparison is deferred does not
    wait, so its next one, some updates later, would match.

    Attributes:
        count: Updates so far, in all ranks alike. The axes of a context share it.
    """

    count: int = 0


def count_update(ctx: DistContext) -> None:
    """Note that every rank of a context has updated one of its models."""
    if (updates := ctx.comm.state.slots.get(Updates)) is not None:
        updates.count += 1


@attrs.define(eq=False)
class CallState:
    """What this package keeps about one communicator.

    Attributes:
        thread: Identifier of the thread that makes the calls; None until the first call of a
            communicator that was made for another thread.
        few: Up to how many ranks send whole packets to each other; equal on all of them.
        count: Collectives started on this communicator.
        completed: The number of the last one that completed.
        recent: Of the last ones that were started: the number, the call, and when, in the ns of
            `time.time_ns`.
        verified: Digests of calls on which all ranks agreed.
        received: The packets of the last exchange, from that of this rank on, in which the next
            one writes. Empty before the first.
        packets: The same as a tensor, uint8, (ranks, bytes).
        in_flight: The exchange that has not completed: that of the last device collective, whose
            comparison is deferred, or one that an interrupt left.
        in_main_first: Whether this rank is inside a block of `ops.main_first`.
        raised: The value of `count` when a call was last an error on every rank of this
            communicator, such as for different arguments; 0 if none ever was.
        updates: The updates at the last call.
        device_group: torch's process group for tensors of the device; None before there are any.
        background: The thread of deferred comparisons; None before there are any.
    """

    thread: int | None = attrs.field(factory=threading.get_ident)
    few: int = _FEW
    count: int = 0
    completed: int = 0
    recent: collections.deque[tuple[int, Call, int]] = attrs.field(
        factory=lambda: collections.deque(maxlen=_RECENT), repr=False
    )
    verified: set[bytes] = attrs.field(factory=set)
    received: bytearray = attrs.field(factory=bytearray, repr=False)
    packets: Tensor = attrs.field(default=EMPTY, repr=False)
    in_flight: Exchange | None = None
    in_main_first: bool = False
    raised: int = 0
    updates: int = 0
    device_group: Any = None
    background: BackgroundThread | None = None


def capacity(world_size: int) -> int:
    """Payload bytes that fit in a packet, at this world size."""
    size = min(_MAX_PACKET_BYTES, max(_MAX_TOTAL_BYTES // world_size, 2 * HEADER))
    return size // _UNIT * _UNIT - HEADER


def exchange_payloads(ctx: DistContext, call: Call, payload: Tensor) -> list[Tensor]:
    """Compare a call between all ranks and gather every rank's payload.

    Args:
        payload: uint8, 1-D, on the CPU; lengths may differ between ranks.

    Returns:
        One uint8 tensor per rank, by rank.

    Effects:
        One exchange of packets, and another of payloads: for few ranks only if one does not fit in
        a packet, for many if a rank has one. Nothing at one rank.

    Raises:
        CollectiveError: the calls differ or a rank never joined; on every rank.
    """
    if ctx.world_size == 1:
        return [payload.clone()]
    rows, sizes = exchange_rows(ctx, call, payload, keep=True)
    if not rows.shape[1]:
        return [EMPTY] * ctx.world_size  # without a view of each row, which takes a microsecond
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def exchange_texts(ctx: DistContext, call: Call, text: str) -> list[str]:
    """As `exchange_payloads`, of texts; many ranks send no payloads if all are empty."""
    payload = EMPTY
    if text:
        payload = torch.frombuffer(bytearray(text.encode(errors="replace")), dtype=torch.uint8)
    rows = exchange_payloads(ctx, call, payload)
    if are_empty(rows):
        return [""] * len(rows)
    return [bytes(row.tolist()).decode(errors="replace") for row in rows]


def are_empty(rows: list[Tensor]) -> bool:
    """Whether no rank has sent a payload."""
    return not any(map(Tensor.numel, rows))


def exchange_rows(
    ctx: DistContext,
    call: Call,
    payload: Tensor,
    *,
    keep: bool = False,
    src: int | None = None,
    root: int | None = None,
) -> tuple[Tensor, list[int]]:
    """As `exchange_payloads`, with the payloads as one tensor.

    Args:
        keep: Copy payloads out of the memory of packets, which the next exchange overwrites.
        src: The only rank that has a payload; part of the call.
        root: The only rank that gets the payloads; others may get some. Part of the call.

    Returns:
        uint8, (ranks, bytes), and by rank the number of payload bytes in its row.
    """
    state, ranks = settle(ctx), ctx.world_size
    with rank_loss_guard(ctx, call):
        exchange = _start(ctx, state, call, _digest_of(call), payload, src=src, root=root)
        summary = _complete(ctx, state, exchange)
    if ctx.comm.simulated:  # the same traffic; every rank sends what this rank does
        return payload.repeat(ranks, 1), [payload.numel()] * ranks
    if exchange.comparison is not None:
        if exchange.rows is None:
            return payload.new_empty((ranks, 0)), [0] * ranks
        return ordered(ctx, exchange.rows, summary.largest, src)
    if exchange.rows is not None:
        return exchange.rows, [*summary.sizes]
    rows = state.packets[:, HEADER : HEADER + summary.largest]
    if ctx.rank and summary.largest:
        rows = from_rank_0(ctx, rows)
    elif keep:
        rows = rows.clone()
    return rows, [*summary.sizes]


def send_payload(ctx: DistContext, call: Call, payload: Tensor, src: int) -> Tensor:
    """As `exchange_payloads`, of the payload of one rank; `src` must be part of the call."""
    if ctx.world_size == 1:
        return payload.clone()
    rows, sizes = exchange_rows(ctx, call, payload, keep=True, src=src)
    return rows[src, : sizes[src]]


def collect_payloads(ctx: DistContext, call: Call, payload: Tensor) -> list[Tensor]:
    """As `exchange_payloads`, where only rank 0 gets the payloads, and the others an empty list."""
    if ctx.world_size == 1:
        return [payload.clone()]
    rows, sizes = exchange_rows(ctx, call, payload, keep=True, root=0)
    both = zip(rows, sizes, strict=True)
    return [row[:size] for row, size in both] if ctx.rank == 0 or ctx.comm.simulated else []


def has_few_ranks(ctx: DistContext) -> bool:
    """Whether every rank sends a packet to all; many combine what they have."""
    return ctx.world_size <= ctx.comm.slot(CallState).few


def combine_payloads(ctx: DistContext, call: Call, payload: Tensor, combine: Combine) -> Tensor:
    """As `exchange_payloads`, of many ranks, combined into one that is bitwise equal on all.

    Args:
        payload: uint8, 1-D, on the CPU, of a length that is part of the call.
        combine: A function of its arguments alone.
    """
    state = settle(ctx)
    with rank_loss_guard(ctx, call):
        exchange = _start(ctx, state, call, _digest_of(call), payload, combine=combine)
        _complete(ctx, state, exchange)
    if ctx.comm.simulated:
        return repeated(payload, ctx.world_size, combine)
    return payload if exchange.rows is None else combined(exchange.rows)  # of no bytes


def same_on_all(ctx: DistContext, call: Call, digest: bytes) -> bool:
    """Whether a digest is equal on all ranks, as every rank learns; one exchange of packets.

    Raises:
        CollectiveError: the calls differ or a rank never joined; on every rank.
    """
    state = settle(ctx)
    if ctx.world_size <= state.few:
        local = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        digests = exchange_payloads(ctx, call, local)
        return all(torch.equal(other, digests[0]) for other in digests)
    with rank_loss_guard(ctx, call):
        value = hashlib.blake2b(digest, digest_size=16).digest()
        exchange = _start(ctx, state, call, _digest_of(call), EMPTY, value=value)
        return _complete(ctx, state, exchange).same


def compare_calls(ctx: DistContext, call: Call, *, wait: bool = True) -> None:
    """Compare a call between all ranks before its data is sent by another collective.

    Args:
        wait: If False, a call that was verified before is compared no later than at the next
            call, so that the host does not wait for the other ranks.

    Effects:
        One exchange of packets; nothing with `checks=False`.

    Raises:
        CollectiveError: the calls differ or a rank never joined; on every rank.
    """
    if not ctx.comm.checks:
        check_thread(ctx)
        return
    state, digest = settle(ctx), _digest_of(call)
    with rank_loss_guard(ctx, call):
        if not wait and digest in state.verified:
            _start(ctx, state, call, digest, EMPTY, site=call_site(call[0]))
        else:
            _complete(ctx, state, _start(ctx, state, call, digest, EMPTY))
    state.verified.add(digest)


def settle(ctx: DistContext) -> CallState:
    """Complete the exchange that a deferred comparison or an interrupt left in flight.

    Returns:
        What is kept about the communicator, with no exchange in flight.

    Raises:
        CollectiveError: its calls differed or a rank never joined; on every rank. Or an earlier
            call broke the communicator, or as `check_thread`.
    """
    state = check_thread(ctx)
    if ctx.comm.state.failure is not None:
        raise CollectiveError(
            f"An earlier call broke this communicator. Close the context and open a new one. "
            f"The earlier error:\n{ctx.comm.state.failure}",
            code="FX302",
        )
    if (exchange := state.in_flight) is not None:
        with rank_loss_guard(ctx, exchange.call, exchange.site):
            _complete(ctx, state, exchange)
    return state


def check_thread(ctx: DistContext) -> CallState:
    """Refuse a call from any thread but the communicator's owner.

    Returns:
        What is kept about the communicator.

    Raises:
        CollectiveError: the communicator belongs to another thread, which is still running.
    """
    state, me = ctx.comm.slot(CallState), threading.get_ident()
    if state.thread == me:
        return state
    # torch's own threads run backward on an accelerator while the calling thread waits.
    if type(threading.current_thread()).__name__ == "_DummyThread":
        return state
    running = {thread.ident: thread.name for thread in threading.enumerate()}
    if state.thread is None or state.thread not in running:
        state.thread = me
        return state
    raise CollectiveError(
        f"Thread {running[me]!r} calls a collective at {call_site('')[1]} on a context owned by "
        f"thread {running[state.thread]!r}. Calls of two threads would interleave differently on "
        f"each rank and mix up their values. Give each thread its own context: call "
        f"ops.duplicate(ctx) on every rank, in the thread that owns this one."
    )


def release_thread(ctx: DistContext) -> None:
    """Let the thread that makes the next call own the communicator."""
    ctx.comm.slot(CallState).thread = None


class rank_loss_guard:
    """Turn torch's error about a lost rank into one that names who waited where."""

    def __init__(self, ctx: DistContext, call: Call, site: CallSite | None = None) -> None:
        self._for = (ctx, call, site)
        self._started = time.monotonic()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ctx, call, site = self._for
        waited_s = time.monotonic() - self._started
        if (pace := ctx.comm.state.slots.get(Pace)) is not None:
            pace.waited_s += waited_s
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError):
            return
        raise lost_rank_error(ctx, call, site or call_site(call[0]), waited_s, error) from error


def _start(
    ctx: DistContext,
    state: CallState,
    call: Call,
    digest: bytes,
    payload: Tensor,
    *,
    site: CallSite | None = None,
    src: int | None = None,
    root: int | None = None,
    combine: Combine | None = None,
    value: bytes = b"",
) -> Exchange:
    """Send this rank's packet. The comparison of a call with its `site` is deferred."""
    state.count += 1
    clock = ctx.comm.state.slots.get(Updates)
    updates = 0 if clock is None else clock.count
    passed, state.updates = updates - state.updates, updates
    if site is None:
        passed, shown = WAITED, f"{call[0]}({call[1][:SHOWN]})"
    else:
        where = f" at {os.path.basename(site[1])} after {counted(passed, 'update')}"
        shown = f"{call[0]}({call[1][: max(0, SHOWN - 2 - len(call[0] + where))]}){where}"
    state.recent.append((state.count, call, time.time_ns()))
    text = shown[:SHOWN].encode(errors="replace")[:SHOWN]
    if ctx.world_size <= state.few:
        work, comparison = _packets(ctx, state, digest, payload, passed, text), None
    else:
        work = comparison = _heads(ctx, digest, value, payload.numel(), passed, text)
    exchange = state.in_flight = Exchange(
        call, digest, payload, work, site, src, root, combine, comparison
    )
    if passed != WAITED:
        exchange.work = background = _in_background(ctx, state, exchange)
        background.start()
    return exchange


def _packets(
    ctx: DistContext, state: CallState, digest: bytes, payload: Tensor, passed: int, text: bytes
) -> Messages:
    """Header and payload of this rank, sent to all of few ranks."""
    ranks, size, room = ctx.world_size, payload.numel(), capacity(ctx.world_size)
    pace, length = ctx.comm.state.slots.get(Pace), HEADER + room
    if not state.received:
        state.received = bytearray(ranks * length)
        state.packets = plain_bytes(state.received, ranks)
    micros = 0 if pace is None else min(pace.micros, _MAX_MICROS)
    _HEADER.pack_into(state.received, 0, digest, size, micros, passed, text)
    if 0 < size <= room:
        state.packets[0, HEADER : HEADER + size] = payload
    if ctx.comm.simulated:
        state.received[:] = state.received[:length] * ranks
    rounds = gather_rounds(ctx.rank, ranks)
    return Messages(group=ctx.comm.control, rounds=rounds, rows=state.packets)


def _heads(
    ctx: DistContext, digest: bytes, value: bytes, size: int, passed: int, text: bytes
) -> Comparison:
    """What compares the call among many ranks."""
    pace = ctx.comm.state.slots.get(Pace)
    is_new = pace is not None and pace.fresh and ctx.comm.name == "world"
    return Comparison(
        ctx.comm.control,
        ctx.rank,
        ctx.world_size,
        digest=digest,
        value=value,
        size=size,
        micros=min(pace.micros, _MAX_MICROS) if pace is not None and is_new else 0,
        passed=passed,
        text=text,
        simulated=ctx.comm.simulated,
    )


def _in_background(ctx: DistContext, state: CallState, exchange: Exchange) -> BackgroundWork:
    """Compare a call in a thread, which aborts the device's communicator if the ranks differ.

    A rank that reads a result before its next call waits for its device, which waits for ranks that
    may have made another call. The device then continues, and the next call raises the error.
    """
    if state.background is None:
        state.background = BackgroundThread()
        ctx.comm.state.last_checks.append(lambda: settle(ctx) and None)
        ctx.comm.state.at_close.append(state.background.stop)
    work = exchange.work

    def compare() -> None:
        differ = True  # also if a rank was lost
        try:
            work.wait(timedelta(seconds=ctx.comm.timeout_s))
            differ = summary_of(ctx, state, exchange).differ
        finally:
            if differ and state.device_group is not None:
                state.device_group.abort()

    return BackgroundWork(state.background, compare)


def _complete(ctx: DistContext, state: CallState, exchange: Exchange) -> CallSummary:
    """Wait for every rank's packet, and for the payloads that follow.

    An interrupt between two statements leaves the exchange in flight; the next call takes it up.

    Returns:
        What the ranks have learned of their calls.
    """
    until = time.monotonic() + ctx.comm.timeout_s
    room = capacity(ctx.world_size) if exchange.comparison is None else 0
    # Messages are not recorded, so this is what a trace shows of an exchange.
    with _TORCH._profiler._RecordFunctionFast("fxtrain::exchange"):
        if exchange.summary is None:
            exchange.work.wait(remaining(until))
            exchange.summary = summary_of(ctx, state, exchange)
        summary = exchange.summary
        differ = ctx.comm.checks and summary.differ
        if not differ and summary.largest > room:
            if exchange.rows is None:
                exchange.work, exchange.rows = send_payloads(
                    ctx,
                    exchange.payload,
                    summary.largest,
                    few=exchange.comparison is None,
                    src=exchange.src,
                    root=exchange.root,
                    combine=exchange.combine,
                )
            exchange.work.wait(remaining(until))
    state.in_flight = None
    state.completed = state.count
    pace = ctx.comm.state.slots.get(Pace)
    if pace is not None and pace.fresh and summary.micros and ctx.comm.name == "world":
        if ctx.is_main:
            pace.compare(ctx, summary.micros)
        elif exchange.comparison is not None:
            pace.fresh = False
    if differ and summary.deferred:
        # Such a rank may wait for its device, so that it cannot take part in another exchange.
        state.verified.clear()
        if state.device_group is not None:
            state.device_group.abort()
            state.device_group = None  # the next call opens another one
        raise deferred_mismatch_error(ctx, [*summary.shown])
    if differ:
        text = mismatch_text(exchange.call, exchange.site or call_site(exchange.call[0]))
        cut = text.encode()[: capacity(ctx.world_size) - 1].decode(errors="ignore")
        texts = exchange_texts(ctx, _DESCRIBE, cut)
        state.raised = state.count
        raise mismatch_error(ctx, texts)
    return summary


def summary_of(ctx: DistContext, state: CallState, exchange: Exchange) -> CallSummary:
    """What the ranks have learned of their calls, once the packets of an exchange have arrived."""
    if exchange.comparison is not None:
        assert exchange.comparison.summary is not None
        return exchange.comparison.summary
    ranks, length = ctx.world_size, HEADER + capacity(ctx.world_size)
    places = [(rank - ctx.rank) % ranks * length for rank in range(ranks)]
    headers = [_HEADER.unpack_from(state.received, place) for place in places]
    digests, sizes, micros, updates, texts = zip(*headers, strict=True)
    passed = {*updates} - {WAITED}
    differ = len({*digests}) > 1 or len(passed) > 1
    shown: list[str] = []
    if differ:
        shown = [text.rstrip(b"\0").decode(errors="ignore") for text in texts]
    return CallSummary(
        differ=differ,
        deferred=bool(passed),
        largest=max(sizes),
        sizes=sizes,
        micros=micros,
        shown=shown,
    )


def _digest_of(call: Call) -> bytes:
    return hashlib.blake2b("\0".join(call[:2]).encode(), digest_size=16).digest()
