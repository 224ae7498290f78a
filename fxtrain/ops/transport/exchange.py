"""The exchange of packets with which every collective starts.

Every collective of fxtrain starts with one all-gather of fixed-size packets: a header with a
digest of the call, then the payload if it fits. Since the size never depends on the call,
ranks that make different calls can still read each other's packets: each rank sees all
headers, so all of them raise, and the communicator stays usable. (gloo aborts the process
when sizes differ, so the check must come first.) A payload that does not fit follows in a second
all-gather, once the headers agree.
"""

import collections
import hashlib
import os
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from fxtrain._display import counted
from fxtrain.errors import CollectiveError
from fxtrain.ops.transport.mismatches import (
    CallSite,
    call_site,
    deferred_mismatch_error,
    lost_rank_error,
    mismatch_error,
    mismatch_text,
)
from fxtrain.ops.transport.pace import Pace
from fxtrain.state import DistContext

# Digest, payload length, pace of the rank, updates since the last call if the comparison of this
# one is deferred and -1 otherwise, and what a mismatch shows of a call if no rank can be asked.
_HEADER = struct.Struct("<16sQIi64s")
HEADER = _HEADER.size
_UNIT = 32  # a packet's length is a multiple of it
_SHOWN = 64  # bytes of text in a header
_WAITED = -1
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
        work: The all-gather of packets, or that of payloads which follows it.
        site: Where the call is made; None to find it when it is needed.
        rows: Every rank's payload, uint8, (ranks, the longest), if one does not fit in a packet.
        updates: Of models in this context since the last call, if the comparison is deferred.
    """

    call: Call
    digest: bytes
    payload: Tensor
    work: dist.Work
    site: CallSite | None = None
    rows: Tensor | None = None
    updates: int = _WAITED


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
        count: Collectives started on this communicator.
        completed: The number of the last one that completed.
        recent: Of the last ones that were started: the number, the call, and when, in the ns of
            `time.time_ns`.
        verified: Digests of calls on which all ranks agreed.
        received: The packets of the last exchange, by rank, which the next one overwrites: this
            rank writes its own there. Empty before the first.
        packets: The same as a tensor, uint8, (ranks, bytes).
        in_flight: The exchange that has not completed: that of the last device collective, whose
            comparison is deferred, or one that an interrupt left.
        in_main_first: Whether this rank is inside a block of `ops.main_first`.
        differed: The value of `count` when calls of the ranks last differed, which is an error on
            every rank of this communicator; 0 if they never did.
        updates: The updates at the last call.
        device_group: torch's process group for tensors of the device; None before there are any.
    """

    thread: int | None = attrs.field(factory=threading.get_ident)
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
    differed: int = 0
    updates: int = 0
    device_group: Any = None


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
        One exchange of packets, and an all-gather of the longest payload if one does not fit in
        a packet. Nothing at one rank.

    Raises:
        CollectiveError: the calls differ or a rank never joined; on every rank.
    """
    if ctx.world_size == 1:
        return [payload.clone()]
    rows, sizes = exchange_rows(ctx, call, payload, keep=True)
    return [row[:size] for row, size in zip(rows, sizes, strict=True)]


def exchange_texts(ctx: DistContext, call: Call, text: str) -> list[str]:
    """As `exchange_payloads`, of texts."""
    payload = torch.frombuffer(bytearray(text.encode(errors="replace") + b"\n"), dtype=torch.uint8)
    rows = exchange_payloads(ctx, call, payload)
    return [bytes(row.tolist()).decode(errors="replace")[:-1] for row in rows]


def exchange_rows(
    ctx: DistContext, call: Call, payload: Tensor, *, keep: bool = False
) -> tuple[Tensor, list[int]]:
    """As `exchange_payloads`, with the payloads as one tensor.

    Args:
        keep: Copy payloads out of the memory of packets, which the next exchange overwrites.

    Returns:
        uint8, (ranks, bytes), and by rank the number of payload bytes in its row.
    """
    state = settle(ctx)
    with rank_loss_guard(ctx, call):
        exchange = _start(ctx, state, call, _digest_of(call), payload)
        sizes = _complete(ctx, state, exchange)
    if ctx.comm.simulated:  # the same traffic; every rank sends what this rank does
        return payload.repeat(ctx.world_size, 1), sizes
    if exchange.rows is not None:
        return exchange.rows, sizes
    rows = state.packets[:, HEADER : HEADER + max(sizes)]
    return rows.clone() if keep else rows, sizes


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
) -> Exchange:
    """Send this rank's packet. The comparison of a call with its `site` is deferred."""
    state.count += 1
    clock = ctx.comm.state.slots.get(Updates)
    updates = 0 if clock is None else clock.count
    passed, state.updates = updates - state.updates, updates
    if site is None:
        passed, shown = _WAITED, f"{call[0]}({call[1][:_SHOWN]})"
    else:
        where = f" at {os.path.basename(site[1])} after {counted(passed, 'update')}"
        shown = f"{call[0]}({call[1][: max(0, _SHOWN - 2 - len(call[0] + where))]}){where}"
    state.recent.append((state.count, call, time.time_ns()))
    size, room, pace = payload.numel(), capacity(ctx.world_size), ctx.comm.state.slots.get(Pace)
    length = HEADER + room
    if not state.received:
        state.received = bytearray(ctx.world_size * length)
        # Its values are read, also in a dry run, and overwritten, also after inference.
        with _disable_current_modes(), torch.inference_mode(mode=False):
            flat = torch.frombuffer(state.received, dtype=torch.uint8)
            state.packets = flat.view(ctx.world_size, length)
    begin, micros = ctx.rank * length, 0 if pace is None else min(pace.micros, _MAX_MICROS)
    text = shown[:_SHOWN].encode(errors="replace")
    _HEADER.pack_into(state.received, begin, digest, size, micros, passed, text)
    packet = state.packets[ctx.rank]
    if 0 < size <= room:
        packet[HEADER : HEADER + size] = payload
    if ctx.comm.simulated:
        state.received[:] = state.received[begin : begin + length] * ctx.world_size
    work = _all_gather(ctx, state.packets, packet)
    exchange = state.in_flight = Exchange(call, digest, payload, work, site, updates=passed)
    return exchange


def _complete(ctx: DistContext, state: CallState, exchange: Exchange) -> list[int]:
    """Wait for every rank's packet, and for the payloads if one does not fit in a packet.

    An interrupt between two statements leaves the exchange in flight; the next call takes it up.

    Returns:
        By rank, the bytes of its payload.
    """
    until = time.monotonic() + ctx.comm.timeout_s
    room = capacity(ctx.world_size)
    # Messages are not recorded, so this is what a trace shows of an exchange.
    with _TORCH._profiler._RecordFunctionFast("fxtrain::exchange"):
        exchange.work.wait(_remaining(until))
        headers = read_headers(ctx, state)
        sizes = [size for _, size, *_ in headers]
        differ = ctx.comm.checks and headers_differ(headers)
        if not differ and max(sizes) > room:
            if exchange.rows is None:
                payload = exchange.payload
                rows = payload.new_empty((len(sizes), max(sizes)))
                if gap := max(sizes) - payload.numel():
                    payload = torch.cat([payload, payload.new_empty(gap)])
                exchange.work, exchange.rows = _all_gather(ctx, rows, payload), rows
            exchange.work.wait(_remaining(until))
    state.in_flight = None
    state.completed = state.count
    pace = ctx.comm.state.slots.get(Pace)
    if pace is not None and pace.fresh and ctx.is_main and ctx.comm.name == "world":
        pace.compare(ctx, [micros for _, _, micros, *_ in headers])
    if differ and any(passed != _WAITED for *_, passed, _ in headers):
        # Such a rank may wait for its device, so that it cannot take part in another exchange.
        state.verified.clear()
        if state.device_group is not None:
            state.device_group.abort()
            state.device_group = None  # the next call opens another one
        shown = [text.rstrip(b"\0").decode(errors="ignore") for *_, text in headers]
        raise deferred_mismatch_error(ctx, shown)
    if differ:
        text = mismatch_text(exchange.call, exchange.site or call_site(exchange.call[0]))
        cut = text.encode()[: room - 1].decode(errors="ignore")
        texts = exchange_texts(ctx, _DESCRIBE, cut)
        state.differed = state.count
        raise mismatch_error(ctx, texts)
    return sizes


def is_deferred(exchange: Exchange) -> bool:
    """Whether the host continues before the ranks compare this call."""
    return exchange.updates != _WAITED


def read_headers(ctx: DistContext, state: CallState) -> list[tuple[Any, ...]]:
    """The header of each rank's packet of an exchange that has arrived."""
    length = HEADER + capacity(ctx.world_size)
    received = state.received
    return [_HEADER.unpack_from(received, at) for at in range(0, len(received), length)]


def headers_differ(headers: list[tuple[Any, ...]]) -> bool:
    """Whether ranks made different calls, or the same one after other numbers of updates."""
    digests, updates = {h[0] for h in headers}, {h[3] for h in headers} - {_WAITED}
    return len(digests) > 1 or len(updates) > 1


def _remaining(until: float) -> timedelta:
    return timedelta(seconds=max(until - time.monotonic(), 0.001))


def _all_gather(ctx: DistContext, rows: Tensor, local: Tensor) -> dist.Work:
    """Start an all-gather of bytes that torch's profiler does not record.

    It may be in flight when a profiler stops. An event of gloo that ends after that is written
    into freed memory (torch 2.13): docs/profiling.md.
    """
    assert ctx.comm.control is not None  # a context of several ranks has one
    # Methods of the group cost a quarter less than the functions of torch.distributed.
    gather: Callable[..., dist.Work] = ctx.comm.control._allgather_base
    if not _TORCH._autograd._profiler_enabled():
        return gather(rows.view(-1), local)
    record = _TORCH._autograd._enable_record_function
    record(False)  # noqa: FBT003 - torch takes no keyword
    try:
        return gather(rows.view(-1), local)
    finally:
        record(True)  # noqa: FBT003


def _digest_of(call: Call) -> bytes:
    return hashlib.blake2b("\0".join(call[:2]).encode(), digest_size=16).digest()
