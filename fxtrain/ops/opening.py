"""Opening process groups within a time, by their members alone, and for a second context."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import attrs
import torch
from torch import distributed as dist

from fxtrain.errors import ContextError
from fxtrain.ops.closing import answered, read_views, within
from fxtrain.ops.devices import check_own_device
from fxtrain.ops.rendezvous_store import first_line
from fxtrain.ops.transport.exchange import CallState, rank_loss_guard, settle
from fxtrain.ops.transport.messages import connect_ranks
from fxtrain.ops.transport.mismatches import by_rank, ranks_on
from fxtrain.ops.transport.rounds import count_rounds
from fxtrain.state import Comm, CommState, DistContext
from fxtrain.state.context import check_connected
from fxtrain.state.topology import Topology

try:
    import resource
except ImportError:  # not on Windows
    resource = None

# An error comes at most two seconds after the timeout.
_MORE_S = 0.25  # for torch's own error, which comes at the timeout
_LOOK_S = 0.6  # to read what other ranks have written, and then for them to fail too
_ANSWER_S = 0.15
_PROBE_S = 0.4
_GROUPS = 3  # of the context, and that of background saves
_GROUP_FILES = 8  # of a gloo group without connections
_OPEN_FILES = "/dev/fd"
_DISCARD = 9  # a port where usually nothing listens
_MANY = 1000  # more than a process has groups open


def allow_files(ranks: int) -> None:
    """Let this process open as many files as the system permits, of which sockets are some.

    gloo ends the process without an error of Python when it cannot open one.
    """
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS permits fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    needed = _GROUPS * (_GROUP_FILES + 2 * count_rounds(ranks))
    opened = len(os.listdir(_OPEN_FILES)) if os.path.isdir(_OPEN_FILES) else 0
    if soft != resource.RLIM_INFINITY and soft < opened + needed:
        raise ContextError(
            f"detect: {ranks} ranks need about {needed} open files in each process, beside the "
            f"{opened} that are open, and this process may have {soft}. Raise the limit: "
            f"ulimit -n 65536 in the shell, LimitNOFILE= of a systemd unit, or --ulimit nofile= of "
            f"a container.",
            code="FX102",
        )


def open_group(
    topology: Topology,
    device: torch.device,
    store: Any,
    wait: timedelta,
    *,
    addresses: Sequence[str] = (),
) -> None:
    """Open torch's default process group over a store that every rank has joined.

    `addresses` reach this rank from other machines, if there are several. A rank that is not
    reached within `wait` and a second is a ContextError, with what each rank saw.
    """
    try:
        library = "xla" if device.type == "xla" else dist.get_default_backend_for_device(device)
    except ValueError as error:
        raise ContextError(
            f"detect: torch knows no communication library for {device.type} tensors. Import the "
            f"package that registers one, or open a process group before calling detect."
        ) from error
    # The control group carries CPU tensors; torch_xla's group takes a single backend.
    single = device.type in ("cpu", "xla")
    check_own_device(topology, device, store, wait.total_seconds())
    backend = library if single else f"cpu:gloo,{device.type}:{library}"
    store.set(f"opens/{topology.rank}", json.dumps(list(addresses)))
    settings: dict[str, Any] = {
        "backend": backend,
        "store": dist.PrefixStore("group", store),
        "rank": topology.rank,
        "world_size": topology.world_size,
        "timeout": wait,
        "device_id": device if library in ("nccl", "xccl", "hccl") else None,
    }
    error = _open_in_time(settings, device, wait.total_seconds())
    if error is not None:
        raise ContextError(_message(topology, store, backend, error), code="FX102") from error


def _open_in_time(
    settings: dict[str, Any], device: torch.device, wait_s: float
) -> Exception | None:
    """Open the default process group; the error if that failed.

    gloo waits five times its timeout for ranks that cannot reach this one, in a call that nothing
    interrupts. So it runs in a thread, which is left behind if it takes longer.
    """
    errors: list[Exception] = []
    late = threading.Event()

    def init() -> None:
        try:
            if device.index is not None and device.type != "xla":
                torch.accelerator.set_device_index(device.index)  # of this thread
            dist.init_process_group(**settings)
            if "gloo" in settings["backend"]:  # which has connected no ranks yet
                rank, ranks = settings["rank"], settings["world_size"]
                connect_ranks(dist.group.WORLD, rank, ranks, settings["timeout"])
        except Exception as error:  # for the thread that waits
            errors.append(error)
        if late.is_set() and dist.is_initialized():
            dist.destroy_process_group()

    if device.type == "xla":  # whose runtime belongs to the main thread
        init()
    elif not within(wait_s + _MORE_S, init):
        late.set()
        return TimeoutError(f"no connection to every rank within {wait_s:g} s.")
    if errors and not isinstance(errors[0], RuntimeError | ValueError):
        raise errors[0]
    return errors[0] if errors else None


def _message(topology: Topology, store: Any, backend: str, error: Exception) -> str:
    """What each rank saw, and which ones this rank does not reach; informs the other ranks."""
    me, ranks = f"Rank {topology.rank} of {topology.world_size}", range(topology.world_size)
    errors: dict[int, str] = {}
    hosts: dict[int, str] = {}
    places: dict[str, list[int]] = {}
    deadline = time.monotonic() + _LOOK_S

    def look() -> None:
        for rank in ranks:
            if time.monotonic() > deadline:  # a question per rank takes long at thousands of them
                return
            if topology.num_nodes > 1:
                hosts[rank] = store.get(f"host/{rank}").decode()
            if store.check([f"opens/{rank}"]):
                for place in json.loads(store.get(f"opens/{rank}")):
                    places.setdefault(place, []).append(rank)
            else:
                errors[rank] = "never began to open it"

    known = answered(_LOOK_S + _ANSWER_S, look)
    far = [
        f"{ranks_on(places[place], hosts)} at {place} ({why})"
        for place, why in _unreached(places).items()
    ]
    errors[topology.rank] = first_line(error) + f" It does not reach {'; '.join(far)}." * bool(far)
    until = time.monotonic() + _LOOK_S

    def ask() -> None:
        store.set(f"unopened/{topology.rank}", errors[topology.rank])
        read_views(store, {rank: {f"unopened/{rank}": ""} for rank in ranks}, errors, until)

    known = known and answered(_LOOK_S + _ANSWER_S, ask)
    silent = "has reported no error yet" if known else "unknown, since the store does not answer"
    views = [(rank, errors.get(rank, silent)) for rank in ranks]
    did = f"did not reach {'; '.join(far)} to open" if far else "could not open"
    lines = [
        f"{me} {did} the process group {backend!r}.",
        *by_rank(views, hosts),
        "Check the output of ranks that never began. Machines must reach each other at the "
        "addresses of the interfaces that GLOO_SOCKET_IFNAME names.",
    ]
    return "\n".join(lines)


def _unreached(places: Collection[str]) -> dict[str, str]:
    """Of addresses, those that do not answer a connection within a moment, and why.

    A machine that refuses it answers.
    """

    def probe(place: str) -> str:
        try:
            socket.create_connection((place, _DISCARD), _PROBE_S).close()
        except ConnectionRefusedError:
            return ""
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return error.strerror or str(error)
        return ""

    with ThreadPoolExecutor(max_workers=len(places) or 1) as pool:
        why = dict(zip(places, pool.map(probe, places), strict=True))
    return {place: text for place, text in why.items() if text}


def duplicate(ctx: DistContext) -> DistContext:
    """Make a context over the same ranks with a separate group, for another thread.

    Collectives are matched by their order, so only the thread that opened a context may use it.
    A duplicate belongs to the thread that first uses it. Make one per thread, and pass each to
    the corresponding thread on every rank.

    Effects:
        Opens a gloo group and returns once every rank has connected; every rank must call it at
        the same point. The group closes with the context.

    Raises:
        CollectiveError: a rank never joined.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.duplicate(ctx).world_size
        1
    """
    check_connected("duplicate", ctx)
    comm, fresh = ctx.comm, CommState()
    comm.state.children.add(fresh)
    if ctx.world_size == 1 or comm.simulated:
        return attrs.evolve(ctx, comm=attrs.evolve(comm, close=Comm().close, state=fresh))
    settle(ctx)
    # Equal on every rank, since all have made the same calls and opened the same groups.
    name = f"{comm.name}+{comm.slot(CallState).count}.{len(comm.state.opened_groups)}"
    with rank_loss_guard(ctx, ("duplicate", "")):
        world: Any = dist.group.WORLD
        new_group = open_by_members if ctx.world_size < world.size() else dist.new_group
        wait = timedelta(seconds=comm.timeout_s)
        group: Any = new_group(
            list(comm.ranks), timeout=wait, backend="gloo", group_desc="fxtrain duplicate"
        )
        comm.state.opened_groups.append(group)
        # Closing a group early would break ranks that still connect. An earlier context may have
        # used the key, so arrivals are counted in rounds.
        store, key = comm.store, f"{name}/connected"
        arrived = store.add(key, 1)
        if arrived % ctx.world_size == 0:
            store.set(f"{key}/{arrived}", "")
        last = -(-arrived // ctx.world_size) * ctx.world_size
        store.wait([f"{key}/{last}"], wait)
        # gloo connects with the first message, and waits five timeouts for a rank that has ended.
        connect_ranks(group, ctx.rank, ctx.world_size, wait)
    copy = attrs.evolve(
        comm, group=group, control=group, name=name, close=Comm().close, state=fresh
    )
    return attrs.evolve(ctx, comm=copy, device=torch.device("cpu"))


def open_by_members(ranks: list[int], **options: Any) -> Any:
    """Open a process group by its members alone, who open the same groups in the same order.

    torch names such a group after its ranks and the number of open groups. Once other groups have
    been closed, the name may clash with an earlier group of these ranks. torch refuses an open
    one; a closed one left stale addresses in the store. Here the number counts the groups of these
    ranks that this rank has opened, so that no name is used twice.
    """
    # torch_xla replaces torch.distributed.new_group with one that takes fewer arguments.
    library: Any = dist.distributed_c10d
    names: dict[Any, str] = dist.distributed_c10d._world.pg_names  # pyright: ignore
    simulated = dist.get_backend() == "fake"  # its store does not count
    key = f"fxtrain/groups/{'_'.join(map(str, ranks))}/{library.group.WORLD.rank()}"
    number = _MANY + (0 if simulated else library._get_default_store().add(key, 1))
    placeholders: list[object] = []
    try:
        while True:
            placeholders += [object() for _ in range(number - len(names))]
            names.update(dict.fromkeys(placeholders, ""))
            try:
                return library.new_group(ranks, use_local_synchronization=True, **options)
            except ValueError as error:
                if not simulated or "group name" not in str(error):
                    raise
                number += 1
    finally:
        for placeholder in placeholders:
            del names[placeholder]
