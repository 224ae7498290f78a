"""The replicas that train together at an update, and the traffic between them.

torchft's lighthouse, a process of its own, hears a heartbeat of each replica. Before an update, its
manager asks the lighthouse who takes part, opens a process group of those, and sends the state of
a replica that is up to date to those that are not.
"""

import contextlib
import functools
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain import ops
from fxtrain._addresses import find_route
from fxtrain._optional import optional
from fxtrain._record import record
from fxtrain.errors import CollectiveError, PlanError
from fxtrain.ops.connecting import connecting_at_once, set_defaults
from fxtrain.state import DiLoCo, DistContext, LocalSGD

_BUCKET_BYTES = 64 << 20
_CHUNK_BYTES = 256 << 20  # of a state, in one message
_WAITS = 10  # times `timeout_s`, for replicas that start or finish an update
_PAUSE_S = 0.1
_TAG = 1
_TICKS = 5  # within the time after which a replica is given up


@record
class Replicas:
    """Which replicas a run has, and how long they wait for each other.

    Attributes:
        count: Replicas of the run when all of them are there.
        lighthouse: Address of torchft's lighthouse, such as `"http://node0:29510"`.
        min_count: Replicas without which no update is made.
        batch: `"keep"` gives the rows of missing replicas to the others, so that every update
            averages over as many rows as with all replicas. `"shrink"` leaves them to later
            updates, which are then more.
        timeout_s: Seconds that replicas wait for each other in an exchange; more than the slowest
            update takes. They wait ten times as long for `min_count` to be there.
        heartbeat_s: Seconds without a sign of life after which a replica is given up, such as one
            that is frozen or has lost its network. A call of a library that keeps Python's lock
            for longer makes the others repeat the update.
        local: How replicas that train independently are averaged: `fx.LocalSGD` or `fx.DiLoCo`.
            None adds up gradients in every update.
        name: Of this replica, for logs; the same after a restart.

    Example:
        >>> import fxtrain as fx
        >>> fx.replicas.Replicas(count=4, lighthouse="http://node0:29510").min_count
        1
    """

    count: int = attrs.field(validator=attrs.validators.ge(1))
    lighthouse: str
    min_count: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    batch: str = attrs.field(default="keep", validator=attrs.validators.in_(("keep", "shrink")))
    timeout_s: float = attrs.field(default=60.0, validator=attrs.validators.gt(0))
    heartbeat_s: float = attrs.field(default=1.0, validator=attrs.validators.gt(0))
    local: LocalSGD | DiLoCo | None = None
    name: str = ""

    def __attrs_post_init__(self) -> None:
        if self.min_count > self.count:
            raise PlanError(
                f"Replicas(min_count={self.min_count}): a run of {self.count} replicas never has "
                f"that many. Use at most count={self.count}."
            )
        if not urlsplit(self.lighthouse).hostname:
            raise PlanError(
                f"Replicas(lighthouse={self.lighthouse!r}) is no address. Start "
                f"`torchft_lighthouse --min_replicas 1 --bind [::]:29510` on a machine that all "
                f'replicas reach, and use "http://MACHINE:29510".'
            )


class Heartbeats:
    """Whether the other replicas still run, by counters in the store that opened their group.

    A replica whose process is frozen, or whose machine has lost its network, keeps its connections
    open, so that the others wait in an all-reduce until its timeout. A thread of each rank raises a
    counter in the store and reads those of the others. A second thread cuts the connections of the
    group if one has not changed for `missed_s` while this rank waits, and calls `report` with the
    numbers of such replicas. The all-reduce then fails as if the other replica had been killed, on
    the remaining replicas too, since they are cut off in turn. In `shared`, the store of this
    replica's ranks, a rank whose peer is lost asks the others to cut their connections too.
    """

    def __init__(self, missed_s: float, report: Callable[[list[int]], None], shared: Any) -> None:
        self._missed_s, self._report, self._shared = missed_s, report, shared
        self._stop = threading.Event()
        self._waits_since: float | None = None

    def start(
        self, store: Any, quorum: object, index: int, count: int, cut: Callable[[], None]
    ) -> None:
        """Begin for the replicas of a group; `cut` closes the connections to them."""
        self._stop = stop = threading.Event()
        now = time.monotonic()
        heard = {other: now for other in range(count) if other != index}
        tick_s, shared, key = self._missed_s / _TICKS, self._shared, f"replicas/{quorum}"

        def watch() -> None:
            while not stop.wait(tick_s):
                since, now = self._waits_since, time.monotonic()
                if since is None or now - since < tick_s:
                    continue
                late = [other for other, at in heard.items() if now - at > self._missed_s]
                if late:
                    self._report(late)
                    if shared is not None:
                        shared.set(key, "")
                if late or (shared is not None and shared.check([key])):
                    stop.set()
                    cut()

        threading.Thread(target=self._beat, args=(store, index, heard, stop), daemon=True).start()
        threading.Thread(target=watch, daemon=True).start()

    def _beat(self, store: Any, index: int, heard: dict[int, float], stop: threading.Event) -> None:
        keys = [f"beat/{other}" for other in heard]
        seen: dict[int, bytes] = {}
        beats = 0
        with contextlib.suppress(RuntimeError):  # the replica that serves the store is gone
            while not stop.wait(self._missed_s / _TICKS):
                beats += 1
                store.set(f"beat/{index}", str(beats))
                if not store.check(keys):
                    continue
                for other, value in zip(heard, store.multi_get(keys), strict=True):
                    if seen.get(other) != value:
                        seen[other], heard[other] = value, time.monotonic()

    def stop(self) -> None:
        """End, without waiting: a store that does not answer blocks a thread."""
        self._stop.set()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which this rank waits for the others."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waits_since = None


@attrs.define(eq=False)
class Members:
    """The replicas at the present update. It is mutable, since they change."""

    settings: Replicas
    manager: Any  # torchft's
    group: Any  # of those that take part, which the manager configures
    store: Any  # of rank 0's manager; kept, since it is served as long as it exists
    beats: Heartbeats
    index: int = 0  # of this replica among those that take part
    live: int = 0  # how many take part

    def gather(self, step: int, update: int) -> None:
        """Find out who takes part in the next exchange, and bring this replica up to date.

        `step` is larger where more was done: a replica with a smaller one than others receives the
        state of one of them. Fewer than `min_count` replicas in time are a CollectiveError.
        """
        settings, wait_s = self.settings, _WAITS * self.settings.timeout_s
        batches = self.manager.batches_committed()
        self.manager.load_state_dict({"step": step, "batches_committed": batches})
        deadline = time.monotonic() + wait_s
        while True:
            failure = None
            try:
                self.manager.start_quorum()
                self.index = self.manager.participating_rank() or 0
                self.live = self.manager.num_participants()
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                failure = error
            if failure is None and self.live >= settings.min_count:
                return
            if failure is not None or time.monotonic() > deadline:
                reason = f" ({_first_line(failure)})" if failure else f": {self.live} were"
                raise CollectiveError(
                    f"Update {update}: {settings.min_count} of "
                    f"{settings.count} replicas were not ready at {settings.lighthouse} within "
                    f"{wait_s:g} s{reason}. Start the missing ones, or use a smaller min_count.",
                    code="FX302",
                ) from failure
            time.sleep(_PAUSE_S)

    def sum(self, tensors: Iterable[Tensor]) -> bool:
        """Add up tensors over the replicas that take part, in place, in buckets of 64 MiB.

        Returns whether that is complete on this rank. If not, a replica was lost, and values are
        undefined.
        """
        works: list[tuple[list[Tensor], Tensor, Any]] = []
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            works.append((bucket, flat, self.manager.allreduce(flat, reduce_op=dist.ReduceOp.SUM)))
        for bucket, flat, work in works:
            with self.beats.waiting():
                work.wait()
            if self.manager.errored() is not None:
                # Others may still wait for what this replica will not send: they see it closed.
                self.group.abort()
                return False
            sizes = [tensor.numel() for tensor in bucket]
            for tensor, summed in zip(bucket, flat.split(sizes), strict=True):
                tensor.copy_(summed.view_as(tensor))
        return True

    def check_history(self, total: float, local: int, update: int) -> None:
        """Compare this replica's digest of what was computed last with the sum of all replicas'."""
        if total != local * self.live:
            raise CollectiveError(
                f"Update {update}: the {self.live} replicas have not all made the last exchange "
                f"together, so their parameters differ. A lighthouse that does not wait for a slow "
                f"replica leaves it to train by itself: start it with a --join_timeout_ms above "
                f"the time between exchanges, and this run again.",
                code="FX302",
            )

    def exchange(self, action: Callable[[], object]) -> bool:
        """Start collectives over the group, or wait for some; whether no replica was lost."""
        try:
            with self.beats.waiting():
                action()
        except RuntimeError as error:
            self.manager.report_error(error)
            self.group.abort()
            return False
        return True

    def commit(self) -> bool:
        """Whether everything since the last `gather` is complete on all ranks of this replica."""
        return bool(self.manager.should_commit())

    def close(self) -> None:
        """Leave: the others find the connections closed, and go on."""
        self.beats.stop()
        self.manager.shutdown(wait=False)
        self.group.abort()


def join(
    ctx: DistContext,
    settings: Replicas,
    pack: Callable[[], Tensor],
    unpack: Callable[[Tensor], None],
) -> Members:
    """Connect this replica to the lighthouse.

    `pack` gives the state of this rank as bytes on the CPU, and `unpack` replaces it by that of
    the same rank of another replica. Rank 0 serves a store and torchft's manager on free ports.
    """
    set_defaults({"RUST_LOG": "warn"})  # torchft logs twenty lines an update otherwise
    torchft: Any = optional("torchft", extra="replicas", needed_by="fx.replicas.train")
    logging.getLogger("torchft.manager").addFilter(_concerns_this_device)
    where = urlsplit(settings.lighthouse)
    route = find_route(where.hostname or "", where.port or 80)
    address = route.address or socket.gethostname()
    set_defaults(route.env)
    store = None
    if ctx.is_main:
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    port = ops.broadcast_object(None if store is None else store.port, ctx)
    timeout = timedelta(seconds=settings.timeout_s)
    on_gpu = ctx.device.type == "cuda"

    def report(late: list[int]) -> None:
        ops.log(ctx, "fxtrain.replicas").warning(
            "Replica %s of the present update has shown no sign of life for %g s and is given up.",
            ", ".join(map(str, late)),
            settings.heartbeat_s,
            everyone=True,
        )

    beats = Heartbeats(settings.heartbeat_s, report, ctx.comm.store)
    group = _watched_group(torchft, beats, timeout, on_gpu=on_gpu)(timeout=timeout)
    try:
        manager = torchft.Manager(
            pg=group,
            load_state_dict=unpack,
            state_dict=pack,
            min_replica_size=settings.min_count,
            use_async_quorum=False,  # so that the rows of this update are known before its forward
            timeout=timeout,
            quorum_timeout=_WAITS * timeout,
            connect_timeout=timeout,
            rank=ctx.rank,
            world_size=ctx.world_size,
            store_addr=address,
            store_port=port,
            lighthouse_addr=settings.lighthouse,
            replica_id=f"{settings.name or 'replica'}_",
            hostname=address,
            checkpoint_transport=_StateTransport(
                group, ctx.device if on_gpu else torch.device("cpu")
            ),
        )
    except (RuntimeError, TimeoutError) as error:
        raise CollectiveError(
            f"No lighthouse answers at {settings.lighthouse} ({_first_line(error)}). Start "
            f"`torchft_lighthouse --min_replicas 1` on that machine, or correct "
            f"Replicas(lighthouse=...).",
            code="FX302",
        ) from error
    return Members(settings=settings, manager=manager, group=group, store=store, beats=beats)


def _concerns_this_device(record: logging.LogRecord) -> bool:
    """False for what torchft logs in each quorum where torch has no recorder of NCCL's calls."""
    return "Unable to reset NCCL flight recorder" not in str(record.msg)


def _watched_group(torchft: Any, beats: Heartbeats, timeout: timedelta, *, on_gpu: bool) -> Any:
    """A class of process groups that torchft configures for the replicas of each quorum."""

    class Group(torchft.ProcessGroupNCCL if on_gpu else torchft.ProcessGroupGloo):
        def configure(
            self, store_addr: str, name: str, rank: int, world_size: int, quorum: int, *more: Any
        ) -> None:
            beats.stop()
            before = open_sockets().items()
            with connecting_at_once():  # so that these are all connections of the group
                super().configure(store_addr, name, rank, world_size, quorum, *more)
            if world_size == 1:
                return
            connections = open_sockets().items() - before
            store = create_store_client(f"{store_addr}/beats", timeout=timeout)
            cut = self.abort if on_gpu else functools.partial(cut_sockets, connections)
            beats.start(store, quorum, rank, world_size, cut)

    create_store_client = torchft.process_group.create_store_client
    return Group


class _StateTransport:
    """Sends a state over the replicas' process group: torchft's own ways unpickle what arrives."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group = group
        self.device = device  # where messages of the group have to be

    def metadata(self) -> str:
        """Nothing that a receiver has to know."""
        return ""

    def send_checkpoint(
        self, dst_ranks: Sequence[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        """Send the numbers of torchft and the bytes of `pack` to each of some replicas."""
        counts = json.dumps(state_dict["torchft"]).encode()
        parts = [
            torch.frombuffer(bytearray(counts), dtype=torch.uint8),
            state_dict["user"]["default"],
        ]
        for rank in dst_ranks:
            sizes = torch.tensor([len(part) for part in parts], device=self.device)
            self.group.send([sizes], rank, _TAG).wait(timeout)
            for part in parts:
                for chunk in part.split(_CHUNK_BYTES):
                    self.group.send([chunk.to(self.device)], rank, _TAG).wait(timeout)

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> dict[str, Any]:
        """Receive what `send_checkpoint` sends."""
        sizes = torch.zeros(2, dtype=torch.int64, device=self.device)
        self.group.recv([sizes], src_rank, _TAG).wait(timeout)
        parts = [torch.empty(int(size), dtype=torch.uint8, device="cpu") for size in sizes]
        for part in parts:
            for chunk in part.split(_CHUNK_BYTES):
                arrived = torch.empty_like(chunk, device=self.device)
                self.group.recv([arrived], src_rank, _TAG).wait(timeout)
                chunk.copy_(arrived)
        return {"torchft": json.loads(bytes(parts[0].tolist())), "user": {"default": parts[1]}}

    def disallow_checkpoint(self) -> None:
        """Everything has been sent when `send_checkpoint` returns."""

    def shutdown(self, wait: bool = True) -> None:  # noqa: FBT001, FBT002 - torchft's signature
        """There is nothing to close."""


def _buckets(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Neighboring tensors of a dtype, as long as they are small."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:200]


def open_sockets() -> dict[int, int]:
    """The sockets of this process: file descriptors and what the kernel calls their files."""
    inodes: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                inodes[int(name)] = status.st_ino
    return inodes


def cut_sockets(sockets: Iterable[tuple[int, int]]) -> None:
    """Shut down connections of `open_sockets`, as if the peer had closed them.

    gloo has no other way to end a collective that has begun: its groups ignore `abort`.
    """
    for number, inode in sockets:
        with contextlib.suppress(OSError):
            if os.fstat(number).st_ino != inode:
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                connection.getpeername()  # a socket that listens has none
                connection.shutdown(socket.SHUT_RDWR)
