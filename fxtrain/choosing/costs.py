"""The time of a step, from the operators and collectives of a dry run: plain formulas."""

import math
from collections.abc import Mapping

import attrs

from fxtrain.choosing.devices import Device
from fxtrain.state import DryRun, Mesh, Operator, Plan, Traffic
from fxtrain.state.mesh import AXES, axis_groups
from fxtrain.state.registry import strategy_of

_DATA = {"replicate", "shard", "context"}
_OVERLAPPED = {"all_gather", "reduce_scatter", "all_reduce"}
# torch.compile fuses elementwise operators. An assumption: a fused one reads and writes half as
# much, with half as many launches.
_FUSED = 0.5


@attrs.frozen(kw_only=True)
class StepCost:
    """The estimated time of a step, from one update to the next, and what it consists of.

    Attributes:
        compute_s: Operators that are limited by FLOPs.
        memory_s: Operators that are limited by memory bandwidth.
        launch_s: Launches of operators that do not overlap with their execution.
        exposed_links_s: Collectives and copies that do not overlap with operators.
        bubble_s: Waiting for other stages of a pipeline.
    """

    compute_s: float
    memory_s: float
    launch_s: float
    exposed_links_s: float
    bubble_s: float

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return sum(attrs.astuple(self))

    @property
    def limit(self) -> str:
        """What takes most of it: compute, memory, launches, links or bubbles."""
        names = ("compute", "memory", "launches", "links", "bubbles")
        return max(zip(attrs.astuple(self), names, strict=True))[1]


def step_cost(run: DryRun, plan: Plan, device: Device) -> StepCost:
    """Estimate how long a step of a dry run takes on a device.

    An operator takes as long as its FLOPs or as the bytes that it reads and writes, whichever is
    longer (the roofline model of Williams, Waterman and Patterson, 2009). Collectives take a
    latency per hop and a time per byte, and overlap with operators as far as the strategy lets
    them.

    Args:
        run: A dry run that fits.
        plan: The plan with which it ran.
        device: What each rank has.

    Returns:
        Seconds of one update of the rank that was simulated.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.choosing import step_cost
        >>> product = fx.state.Operator(
        ...     name="mm", phase="forward", dtype="bf16", flops=10**15, bytes=10**9, count=2)
        >>> run = fx.state.DryRun(name="train", world=1, operators=(product,))
        >>> cost = step_cost(run, fx.Plan(), fx.state.read_device("H100"))
        >>> f"{cost.seconds:.1f}", cost.limit
        ('2.9', 'compute')
    """
    strategy = strategy_of(plan.strategy)
    offload = strategy.in_host_memory(plan)
    compiled = plan.compile is not None
    parts = {"compute": 0.0, "memory": 0.0}
    phases = {"forward": 0.0, "backward": 0.0, "update": 0.0}
    launches = dict.fromkeys(phases, 0.0)
    for operator in run.operators:
        fused = compiled and not operator.flops and operator.phase != "update"
        scale = operator.count * (_FUSED if fused else 1.0)
        on_host = offload and operator.phase == "update"
        compute, memory = _roofline(operator, device, on_host=on_host)
        phases[operator.phase] += scale * max(compute, memory)
        parts["compute" if compute > memory else "memory"] += scale * max(compute, memory)
        # On a GPU, an optimizer updates many tensors with one launch.
        if operator.phase != "update" or device.type == "cpu":
            launches[operator.phase] += scale * device.launch_s
    hooks_s = device.hook_s * _count_hooks(run, plan)
    for phase in ("forward", "backward"):
        launches[phase] += hooks_s / 2
    launch = 0.0
    for phase, busy_s in phases.items():
        more = launches[phase] if device.type == "cpu" else max(0.0, launches[phase] - busy_s)
        launch += more
        phases[phase] += more
    hidden, exposed = _links(run, plan, device, phases)
    if offload:
        # To the device for forward and for backward; gradients to the host.
        copied = run.memory.parameters * (2 * plan.accumulate + 1)
        exposed += copied / (device.host_bandwidth * device.bandwidth_efficiency)
    bubble = strategy.bubble(plan, run.mesh) * (phases["forward"] + phases["backward"] + exposed)
    return StepCost(
        compute_s=parts["compute"],
        memory_s=parts["memory"],
        launch_s=launch,
        exposed_links_s=exposed + hidden,
        bubble_s=bubble,
    )


def _roofline(operator: Operator, device: Device, *, on_host: bool) -> tuple[float, float]:
    """Seconds of one call by its FLOPs, and by its bytes."""
    own: Mapping[str, float] = {}
    if "attention" in operator.name:
        own = device.attention_flops
    elif "convolution" in operator.name:
        own = device.convolution_flops
    rates, efficiency = (own, 1.0) if own else (device.flops, device.efficiency)
    bandwidth = device.host_bandwidth if on_host else device.memory_bandwidth
    return (
        operator.flops / (rates.get(operator.dtype, min(rates.values())) * efficiency),
        operator.bytes / (bandwidth * device.bandwidth_efficiency),
    )


def _count_hooks(run: DryRun, plan: Plan) -> int:
    """How many collectives Python starts within the passes: those of DDP are not among them."""
    own = [row for row in run.step if _gathers(plan) or not _is_of_data(row, run, plan)]
    return sum(row.count for row in own if row.kind != "recv")


def _links(
    run: DryRun, plan: Plan, device: Device, phases: dict[str, float]
) -> tuple[float, float]:
    """Seconds of data ranks' collectives that exceed what they overlap with, and of all others."""
    passes = strategy_of(plan.strategy).overlapped(plan)
    window = sum(phases[name] for name in passes)
    # Gradients that are reduced bucket by bucket travel in the last micro-batch only.
    window /= 1 if _gathers(plan) or plan.sync_each else plan.accumulate
    total = first = exposed = 0.0
    for row in run.step:
        seconds = row.count * collective_s(row, run, device)
        if row.kind in _OVERLAPPED and _is_of_data(row, run, plan):
            total += seconds
            first = max(first, seconds / row.count)
        else:
            exposed += seconds
    # Nothing computes during the first gather, or the reduction of the last bucket.
    return first + max(0.0, total - first - device.overlap * window), exposed


def _gathers(plan: Plan) -> bool:
    """Whether data ranks exchange parameters in forward, and not only gradients."""
    return "forward" in strategy_of(plan.strategy).overlapped(plan)


def _is_of_data(row: Traffic, run: DryRun, plan: Plan) -> bool:
    """Whether a collective is one of parameters or gradients over data ranks."""
    axes = set(_axes(row, run.mesh))
    if not axes:  # hybrid sharding may have a mesh of its own
        return _gathers(plan)
    return axes <= _DATA and axes != {"context"}


def _axes(row: Traffic, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes of a collective; empty for a group of the script's own."""
    if row.axis == "world":
        return tuple(axis for axis in AXES if mesh.sizes[axis] > 1)
    names = ("replicate", "shard") if row.axis == "data" else tuple(row.axis.split(" + "))
    return names if set(names) <= set(AXES) else ()


def collective_s(row: Traffic, run: DryRun, device: Device) -> float:
    """Seconds of one collective: latencies of its hops, and its bytes over the slowest link.

    Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
    in MPICH" (2005), for the hops and bytes of rings and trees; the documentation of nccl-tests
    (PERFORMANCE.md) for bytes that each rank sends.
    """
    ranks = row.ranks
    if ranks < 2:
        return 0.0
    axes = _axes(row, run.mesh)
    own = range(ranks)
    if axes and run.mesh.replicate != -1:
        own = next(group for group in axis_groups(run.mesh, axes) if run.rank in group)
    nodes = len({rank // device.ranks_per_node for rank in own})
    size = row.bytes / row.count
    # A ring crosses each node once in each direction, through the network cards of all its ranks.
    local = math.ceil(ranks / nodes)
    bandwidth, hop = device.link_bandwidth, device.link_latency_s
    if nodes > 1:
        bandwidth = min(bandwidth, local * device.node_bandwidth)
        hop = (device.link_latency_s * (local - 1) + device.node_latency_s) / local
    reached = device.bandwidth_efficiency * device.collective_efficiency.get(row.kind, 1.0)
    bandwidth *= reached
    tree = math.ceil(math.log2(ranks)) * (device.node_latency_s if nodes > 1 else hop)
    if row.kind == "all_reduce":
        # NCCL and gloo choose a tree or a ring by size.
        hops, sent = min(2 * tree, 2 * (ranks - 1) * hop), 2 * size * (ranks - 1) / ranks
    elif row.kind == "all_gather":  # of this rank's part
        hops, sent = (ranks - 1) * hop, size * (ranks - 1)
    elif row.kind == "reduce_scatter":
        hops, sent = (ranks - 1) * hop, size * (ranks - 1) / ranks
    elif row.kind == "all_to_all":  # pairs of ranks on two nodes share no path
        remote = (ranks - local) / ranks * size / device.node_bandwidth if nodes > 1 else 0.0
        return (
            hop * (ranks - 1)
            + max(size * (local - 1) / ranks / device.link_bandwidth, remote) / reached
        )
    elif row.kind == "barrier":
        hops, sent = tree, 0.0
    elif row.kind in ("send", "recv"):
        # Both ends record a transfer; the time is that of the sender.
        between = device.node_latency_s if nodes > 1 else device.link_latency_s
        hops, sent = (between, size) if row.kind == "send" else (0.0, 0.0)
    else:  # broadcast, reduce, gather, scatter
        hops, sent = tree, size
    return hops + sent / bandwidth
