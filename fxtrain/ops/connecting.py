"""Connecting a context from the environment; no other module reads the environment."""

import atexit
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import distributed as dist

from fxtrain import _extensions
from fxtrain._addresses import GLOO, addresses_of, find_route
from fxtrain._record import shown
from fxtrain._secret import SECRET, derive_key
from fxtrain.errors import ContextError
from fxtrain.ops.closing import make_close
from fxtrain.ops.devices import find_device
from fxtrain.ops.objects import gather_objects
from fxtrain.ops.opening import allow_files, open_by_members, open_group
from fxtrain.ops.rendezvous_store import open_store
from fxtrain.ops.standing import STACKS
from fxtrain.ops.transport.exchange import EMPTY, CallState, Updates, exchange_payloads
from fxtrain.ops.transport.pace import Pace
from fxtrain.state import Comm, CommState, DistContext, Mesh, Plan
from fxtrain.state.context import with_plan
from fxtrain.state.files import PLAN_VARIABLE, given_values, plan_with
from fxtrain.state.mesh import SPANS, agreed_mesh, axis_groups, resolve_mesh
from fxtrain.state.parsing import leaves
from fxtrain.state.topology import Topology, read_topology

DEFAULT_TIMEOUT_S = 600.0
LONGEST_S = 1e6  # milliseconds must fit into 31 bits
_CONTROL = "fxtrain control"
_LAZY = "TORCH_GLOO_LAZY_INIT"


def _is_timeout(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= LONGEST_S


def detect(
    env: Mapping[str, str] | None = None,
    *,
    device: str | torch.device | None = None,
    mesh: Mesh | None = None,
    timeout_s: float | None = None,
    checks: bool = True,
) -> DistContext:
    """Find out which rank this process is and connect it to the others.

    An existing process group is reused and left open.

    Args:
        env: Variables to read instead of the process's environment.
        device: Where to compute; by default this rank's accelerator, or the CPU if there is
            none. "xla", or the variable PJRT_DEVICE, selects torch_xla.
        mesh: Ranks per axis; by default that of the launch's plan, or else all ranks on the
            replicate axis. For a rank that drives several XLA devices, the mesh of its devices.
        timeout_s: Longest wait for another rank, here and in every collective, in seconds;
            600 by default.
        checks: Compare every collective call between the ranks before it runs.

    Effects:
        Opens torch's default process group and a gloo group for control traffic when there
        is more than one rank, and one pair of groups per mesh axis, and for the ranks of each node
        if there are several; selects the device.
        The groups are closed when the `with` block or the process ends. Rank 0 serves the
        rendezvous store, unless the launcher does, at the main address only. On several nodes,
        sets GLOO_SOCKET_IFNAME to the interface towards that address, unless it is set. Sets
        TORCH_GLOO_LAZY_INIT, unless it is set, so that ranks of gloo groups connect when they first
        send something to each other, and raises the limit of open files of this process as far as
        the system permits. With the variable
        FXTRAIN_RUN_SECRET objects are signed, and objects without a valid signature are refused.
        A plan in the variable FXTRAIN_PLAN, which `fxtrain launch` sets, or in variables such as
        FXTRAIN_PLAN__SEED=7 under other launchers, becomes the default of `fx.wrap` and
        `fx.shard`.
        With the variable FXTRAIN_STACKS, which `fxtrain launch` sets, a thread writes into that
        folder where this rank stands, if the run makes no progress or someone asks.

    Raises:
        ContextError: the variables contradict each other, the device does not exist, a rank
            never joined within `timeout_s` (the message names it), ranks have different
            secrets, or this process may not open enough files.
        MeshError: the axes do not multiply to the world size, or differ from the mesh of the
            launch's plan; raised before any rank waits.
        PlanError: the variables contain no valid plan; raised before any rank waits.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     ctx.rank, ctx.world_size, ctx.device.type, ctx.launcher
        (0, 1, 'cpu', 'none')
    """
    if not (env is None or isinstance(env, Mapping)):
        raise ContextError(
            f"detect(env={env!r}): not a mapping of environment variables. Name the device as "
            f'fx.detect(device="cpu").'
        )
    variables = os.environ if env is None else env
    key = derive_key(variables.get(SECRET, ""))
    if timeout_s is not None and not _is_timeout(timeout_s):
        raise ContextError(
            f"detect(timeout_s={shown(timeout_s)}): not a timeout. Pass a number of seconds above "
            f"0 and at most {LONGEST_S:.0f}."
        )
    values = given_values(variables)
    plan = plan_with(values, Plan()) if values else None
    wait_s = DEFAULT_TIMEOUT_S if timeout_s is None else float(timeout_s)
    exists = dist.is_available() and dist.is_initialized()
    topology = _existing_topology(variables) if exists else read_topology(variables)
    chosen, devices = find_device(device, variables, topology)
    alone = topology.world_size == 1 and not exists
    mesh = agreed_mesh(mesh, plan and plan.mesh, devices if alone else topology.world_size)
    if alone:
        ctx = _single_rank_context(topology, chosen, devices, mesh, wait_s, checks=checks)
    else:
        if topology.num_nodes > 1 and not exists and GLOO not in variables:
            # gloo uses the network towards the main address, and reads it from the environment.
            route = find_route(topology.main_address, topology.main_port)
            set_defaults({GLOO: route.interface} if route.interface else {})
        # gloo then connects two ranks when they first send something to each other, and not all.
        set_defaults({_LAZY: "1"})
        allow_files(topology.world_size)
        store = None if exists else open_store(topology, wait_s, key=key)
        ctx = _connect_ranks(topology, chosen, mesh, wait_s, checks=checks, store=store, key=key)
    if (folder := variables.get(STACKS)) and not ctx.comm.simulated:
        _extensions.watch_standing(ctx, folder)
    if plan is None:
        return ctx
    return with_plan(ctx, plan, tuple(path for path, _ in leaves(values)))


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set variables of this process that are not set, for libraries that have no other settings."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextmanager
def connecting_at_once() -> Iterator[None]:
    """A block in which gloo groups connect when they open, and not when a rank first sends."""
    usual = os.environ.get(_LAZY)
    os.environ[_LAZY] = "0"
    try:
        yield
    finally:
        del os.environ[_LAZY]
        if usual is not None:
            os.environ[_LAZY] = usual


def plan_variables() -> dict[str, str]:
    """The variables of this process with values of the launch's plan."""
    return {name: text for name, text in os.environ.items() if name.startswith(PLAN_VARIABLE)}


def close(ctx: DistContext) -> None:
    """Close the process groups that `detect` opened for this context. Safe to call twice.

    Effects:
        Waits for background saves. Destroys the process groups that `detect` opened, and leaves
        a process group that existed before.

        Every later call with the context or one of its axes raises ContextError.

    Raises:
        FxError: a background save failed, and its result was never requested.

    Example:
        >>> import fxtrain as fx
        >>> fx.close(fx.detect(env={}, device="cpu"))
    """
    ctx.comm.finish(None)


def _existing_topology(env: Mapping[str, str]) -> Topology:
    """This rank in the existing group; the environment only adds the nodes."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        topology = read_topology(env)
    except ContextError:
        topology = Topology()
    if (topology.rank, topology.world_size) == (rank, world_size):
        return topology
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        launcher="group",
    )


def _single_rank_context(
    topology: Topology,
    device: torch.device,
    devices: int,
    mesh: Mesh | None,
    timeout_s: float,
    *,
    checks: bool,
) -> DistContext:
    comm = Comm(timeout_s=timeout_s, checks=checks)
    shape = resolve_mesh(mesh or Mesh(), devices)
    if devices > 1 and shape.replicate * shape.shard != devices:
        raise ContextError(
            f"detect: the mesh does not match the {devices} XLA devices of this process. XLA "
            f"supports only the axes replicate and shard: make their product {devices}."
        )
    ctx = _context(topology, device, comm, shape, {})
    return attrs.evolve(ctx, devices=devices)


def _connect_ranks(
    topology: Topology,
    device: torch.device,
    mesh: Mesh | None,
    timeout_s: float,
    *,
    checks: bool,
    store: Any,
    key: bytes,
) -> DistContext:
    shape = resolve_mesh(mesh or Mesh(), topology.world_size)
    wait = timedelta(seconds=timeout_s)
    owned = store is not None
    launched = topology
    if owned:
        if device.type == "xla":
            topology = attrs.evolve(
                topology, rank=_extensions.xla_runtime.replicate(topology, device)
            )
        addresses = addresses_of(os.environ.get(GLOO, "")) if topology.num_nodes > 1 else ()
        open_group(topology, device, store, wait, addresses=addresses)
    world = dist.group.WORLD
    simulated = dist.get_backend(world) == "fake"
    # torch_xla replaces torch.distributed.new_group with one that takes fewer arguments.
    library: Any = dist.distributed_c10d
    control = library.new_group(
        timeout=wait, backend="fake" if simulated else "gloo", group_desc=_CONTROL
    )
    shared: dict[type, Any] = {Updates: Updates()}
    if topology.world_size > 1 and not simulated:
        shared[Pace] = Pace()
    state = CommState(slots={**shared})
    comm = Comm(
        group=world,
        control=control,
        # torch has no public access to the store of an existing group.
        store=store if owned or simulated else library._get_default_store(),
        ranks=tuple(range(topology.world_size)),
        timeout_s=timeout_s,
        checks=checks,
        simulated=simulated,
        close=make_close(state, timeout_s, topology=launched if owned else None, store=store),
        state=state,
        key=key,
    )
    state.opened_groups.append(control)
    comm.slot(CallState)  # the thread that connects makes the calls
    spans = {} if mesh is None else SPANS
    parts = {name: axis_groups(shape, span) for name, span in spans.items()}
    if topology.num_nodes > 1:
        parts["node"] = _node_parts(_context(topology, device, comm, shape, {}))
    axes = _open_axes(comm, parts, topology.rank, wait, device, owned=owned, shared=shared)
    ctx = _context(topology, device, comm, shape, axes)
    if not simulated:  # a rank that closes at once would break others that still connect
        exchange_payloads(ctx, ("detect", ""), EMPTY)
    return ctx


def _context(
    topology: Topology,
    device: torch.device,
    comm: Comm,
    mesh: Mesh,
    axes: Mapping[str, tuple[int, Comm]],
) -> DistContext:
    ctx = DistContext(
        rank=topology.rank,
        world_size=topology.world_size,
        local_rank=topology.local_rank,
        local_world_size=topology.local_world_size,
        node_rank=topology.node_rank,
        num_nodes=topology.num_nodes,
        device=device,
        comm=comm,
        mesh=mesh,
        launcher=topology.launcher,
    )
    along = {
        name: attrs.evolve(
            ctx,
            rank=rank,
            world_size=len(part.ranks),
            comm=part,
            mesh=Mesh(replicate=len(part.ranks)),
        )
        for name, (rank, part) in axes.items()
    }
    return attrs.evolve(ctx, axes=MappingProxyType(along))


def _node_parts(ctx: DistContext) -> list[list[int]]:
    """The ranks of each node, wherever the launcher has put them."""
    if ctx.comm.simulated:
        nodes = [rank // ctx.local_world_size for rank in range(ctx.world_size)]
    else:
        nodes = gather_objects(ctx.node_rank, ctx)
    parts: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        parts.setdefault(node, []).append(rank)
    return list(parts.values())


def _open_axes(
    comm: Comm,
    axis_parts: Mapping[str, list[list[int]]],
    rank: int,
    wait: timedelta,
    device: torch.device,
    *,
    owned: bool,
    shared: Mapping[type, Any],
) -> dict[str, tuple[int, Comm]]:
    """One communicator per axis; every rank opens all of them, in the same order.

    Args:
        shared: The slots that they share with the communicator of all ranks.
    """
    opened: dict[tuple[tuple[int, ...], ...], Comm] = {}
    axes: dict[str, tuple[int, Comm]] = {}
    for name, parts in axis_parts.items():
        (group_ranks,) = (part for part in parts if rank in part)
        key = tuple(map(tuple, parts))
        if tuple(group_ranks) == comm.ranks:
            part = comm
        elif key in opened:  # data over the replicate axis only is replicate
            part = opened[key]
        else:
            part = Comm(
                ranks=tuple(group_ranks),
                timeout_s=comm.timeout_s,
                checks=comm.checks,
                state=CommState(slots={**shared}),
            )
            if max(map(len, parts)) > 1:  # nodes may have different numbers of ranks
                group = _open_axis(comm, name, parts, group_ranks, wait, device, owned, part.state)
                part = group if len(group_ranks) > 1 else part
            opened[key] = part
            if len(group_ranks) > 1:
                part.slot(CallState)
        if part is not comm:
            comm.state.children.add(part.state)
        axes[name] = (group_ranks.index(rank), part)
    return axes


def _open_axis(
    comm: Comm,
    name: str,
    parts: list[list[int]],
    group_ranks: list[int],
    wait: timedelta,
    device: torch.device,
    owned: bool,  # noqa: FBT001 - internal
    state: CommState,
) -> Comm:
    group: Any = dist.new_subgroups_by_enumeration(parts, timeout=wait)[0]
    comm.state.opened_groups.append(group)
    control = group
    if not comm.simulated and "cpu:gloo" not in dist.get_backend_config(group).split(","):
        control = _open_control(parts, group_ranks, wait, owned=owned)
        comm.state.opened_groups.append(control)
    if device.type == "xla":
        _extensions.xla_runtime.register_subgroups(group, device, parts)
    return attrs.evolve(
        comm,
        group=group,
        control=control,
        name=f"{name}{group_ranks[0]}",
        ranks=tuple(group_ranks),
        close=Comm().close,
        state=state,
    )


def _open_control(
    parts: list[list[int]], group_ranks: list[int], wait: timedelta, *, owned: bool
) -> Any:
    """The gloo group of this rank's part of an axis, whose own group has none for the CPU.

    Where the default group has a device, torch splits its NCCL communicator on ranks that open a
    group without being in it, even one of gloo. So only members open it, if `detect` opened the
    default group: its name then depends on the groups of this process, equal on all ranks.
    """
    options: dict[str, Any] = {"timeout": wait, "backend": "gloo", "group_desc": _CONTROL}
    if owned:
        return open_by_members(group_ranks, **options)
    groups = [dist.distributed_c10d.new_group(part, **options) for part in parts]
    return groups[parts.index(group_ranks)]


def export_local_rank(ctx: DistContext) -> None:
    """Set LOCAL_RANK to the index of this rank's device on its node.

    DeepSpeed reads it while it trains, so it stays set; `detect` ignores it without the others.
    """
    device = ctx.device.index
    os.environ["LOCAL_RANK"] = str(ctx.local_rank if device is None else device)


def ensure_group(ctx: DistContext) -> None:
    """Open torch's process group for a context of one rank, which has none, until the process ends.

    Its store is not reachable from outside; gloo listens at the address of the host name, or on
    GLOO_SOCKET_IFNAME.
    """
    if dist.is_initialized():
        return
    library = dist.get_default_backend_for_device(ctx.device)
    dist.init_process_group(library, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(_close_group)


def _close_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
