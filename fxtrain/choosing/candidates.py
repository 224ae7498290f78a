"""Which plans could train a model on a number of ranks, and what each needs at least."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import nn

from fxtrain.backends.wrapping import problems_of
from fxtrain.ops.block_names import block_names
from fxtrain.state import (
    DDP,
    FSDP,
    PP,
    TP,
    Device,
    DistContext,
    DryRun,
    Memory,
    Mesh,
    Plan,
    Wrapped,
    unstructure,
)
from fxtrain.state.context import simulated
from fxtrain.state.mesh import resolve_mesh
from fxtrain.state.registry import strategies

Lane = tuple[Any, Mesh]  # a strategy's config, and a resolved mesh
Trial = tuple[Plan, int]  # a plan with its mesh, and rows of a micro-batch on each data rank
_DEGREES = (1, 2, 4, 8, 16, 32, 64)
# Micro-batches of a pipeline for each stage: with 4 the bubble is a fifth of the step.
_DEPTHS = (4, 2, 1)
_TRADE = 0.2  # assumed share of compute that tensor and context parallelism add, to order plans by


@attrs.frozen(kw_only=True)
class Question:
    """What a plan is wanted for.

    Attributes:
        plan: The user's own.
        fixed: Names of the fields of it that stay.
        world: World size.
        node: Ranks of a node.
        rows: Rows of an update; None for those of the user's own plan.
        own_plan: Whether the program's plan takes the place of `plan`, whose mesh stays.
        rows_fixed: Whether the batch size is that of the program, so that only `accumulate` varies.
    """

    plan: Plan
    fixed: frozenset[str]
    world: int
    node: int
    rows: int | None = None
    own_plan: bool = False
    rows_fixed: bool = False


def survey(model: Wrapped, question: Question) -> dict[str, Any]:
    """What decides which plans a model allows, as plain data.

    Args:
        model: As one rank wraps it.
        question: What is asked.

    Returns:
        The user's plan; class names of blocks and their number; the number of experts; rows of a
        micro-batch; and by the number of a lane, why `fx.wrap` refuses it.
    """
    mesh = question.plan.mesh
    plan = attrs.evolve(model.plan, mesh=mesh) if question.own_plan else question.plan
    question = attrs.evolve(question, plan=plan)
    names = block_names(model.module)
    parts = list(model.module.modules())
    experts = max((int(getattr(part, "num_experts", 0) or 0) for part in parts), default=0)
    about: dict[str, Any] = {
        "plan": unstructure(plan),
        "blocks": list(names),
        "depth": sum(type(part).__name__ in names for part in parts),
        "experts": experts,
        "rows": sum(model.window.sizes),
    }
    refused: dict[str, str] = {}
    for number, lane in enumerate(lanes(question, about)):
        if problem := _refusal(question, lane, model.module):
            refused[str(number)] = problem
    return {**about, "refused": refused}


def _refusal(question: Question, lane: Lane, module: nn.Module) -> str:
    """The first line of why `fx.wrap` refuses a lane; empty if it does not."""
    strategy, mesh = lane
    world = question.world
    ctx = DistContext(world_size=world, local_world_size=min(world, question.node), mesh=mesh)
    plan = attrs.evolve(question.plan, strategy=strategy, mesh=mesh)
    entry = strategies().get(type(strategy))
    if entry is None:
        return f"No strategy is registered for {type(strategy).__name__}."
    return next(iter(problems_of(entry, simulated(ctx), plan, module)), "")


def lanes(question: Question, about: Mapping[str, Any]) -> list[Lane]:
    """Strategies on meshes, the user's own first; those of which only batches differ are one."""
    plan, fixed = question.plan, question.fixed
    own = resolve_mesh(plan.mesh or Mesh(), question.world)
    strategies = [plan.strategy] if "strategy" in fixed else list(_configs(plan, about))
    meshes = [own] if "mesh" in fixed else list(_meshes(question, about["depth"]))
    pairs = itertools.product(strategies, meshes)
    found = [(plan.strategy, own), *(pair for pair in pairs if _suits(*pair))]
    once: dict[Any, Lane] = {}
    for strategy, mesh in found:
        # All data ranks are replicas or all are shards: FSDP does the same with both meshes.
        sharded = isinstance(strategy, FSDP) and strategy.shard is None and mesh.shard == 1
        same = attrs.evolve(mesh, replicate=1, shard=mesh.replicate) if sharded else mesh
        once.setdefault((strategy, same), (strategy, mesh))
    return list(once.values())


def _configs(plan: Plan, about: Mapping[str, Any]) -> Iterator[Any]:
    own = plan.strategy
    ddp = own if isinstance(own, DDP) else DDP()
    yield ddp
    yield attrs.evolve(ddp, shard_optimizer=True)
    pp = own if isinstance(own, PP) else PP()
    held = own if isinstance(own, FSDP) else pp.stages or FSDP()
    fsdp = attrs.evolve(held, mode="full", shard=None, tensor=None, expert=None, offload=False)
    split = attrs.evolve(fsdp, tensor=held.tensor or TP())
    yield fsdp
    yield attrs.evolve(fsdp, mode="grads_and_optimizer")
    yield split
    for degree in _DEGREES[1:]:
        if about["experts"] and about["experts"] % degree == 0:
            yield attrs.evolve(fsdp, expert=degree)
    if about["depth"] > 1:
        for stages in (None, fsdp, split):
            yield attrs.evolve(pp, stages=stages)
    yield attrs.evolve(fsdp, offload=True)


def _meshes(question: Question, depth: int) -> Iterator[Mesh]:
    world, node = question.world, question.node
    contexts = (1,) if question.plan.context is None else _DEGREES
    for context, tensor, pipeline in itertools.product(contexts, _DEGREES, _DEGREES):
        inner = context * tensor
        if tensor > node or pipeline > max(depth, 1) or world % (inner * pipeline):
            continue
        data = world // (inner * pipeline)
        axes = {"context": context, "tensor": tensor, "pipeline": pipeline}
        yield Mesh(replicate=data, **axes)
        if data > 1:
            yield Mesh(replicate=1, shard=data, **axes)
        within = node // inner
        if 1 < within < data and data % within == 0:
            yield Mesh(replicate=data // within, shard=within, **axes)


def _suits(strategy: Any, mesh: Mesh) -> bool:
    """Whether a strategy uses every axis of a mesh that has several ranks, and needs no other."""
    held = _sharding(strategy)
    tensor = held is not None and held.tensor is not None
    staged = isinstance(strategy, PP)
    data = mesh.replicate * mesh.shard
    sharded = held is not None and held.mode != "none"
    if (mesh.tensor > 1) != tensor or (mesh.pipeline > 1) != staged:
        return False
    if data == 1:
        plain = isinstance(strategy, DDP) and not strategy.shard_optimizer
        return plain or tensor or staged or mesh.context > 1
    return (mesh.shard > 1) == sharded


def _sharding(strategy: Any) -> FSDP | None:
    """How a strategy holds the model, or each stage of it, if it may be sharded."""
    held = strategy.stages if isinstance(strategy, PP) else strategy
    return held if isinstance(held, FSDP) else None


def offloads(strategy: Any) -> bool:
    """Whether a strategy holds parameters, gradients and optimizer states in host memory."""
    held = _sharding(strategy)
    return held is not None and held.offload


def needs_split(lane: Lane, states: Memory, question: Question, memory: float, rows: int) -> str:
    """Why a lane splits the work of a row over ranks without need; empty if there is one.

    Each rank's own rows cost less traffic, as long as there are enough rows and a device holds
    twice the unsharded parameters, gradients and optimizer states.
    """
    strategy, mesh = lane
    chosen = {"strategy", "mesh"} & question.fixed or strategy == question.plan.strategy
    if mesh.tensor * mesh.pipeline == 1 or chosen or rows < question.world:
        return ""
    if 2 * _total(states) > memory:
        return ""
    return "splits layers or stages of a model that half a device holds, with rows for every rank"


def least_memory(lane: Lane, states: Memory) -> float:
    """Bytes of parameters, gradients and optimizer states on each rank, at least."""
    strategy, mesh = lane
    data, held = mesh.replicate * mesh.shard, _sharding(strategy)
    parts = mesh.tensor * mesh.pipeline
    if offloads(strategy):
        return 0.0
    if held is not None and held.mode != "none":
        shards = held.shard or (mesh.shard if mesh.shard > 1 else data)
        return _total(states) / (parts * shards * mesh.context)
    zero = isinstance(strategy, DDP) and strategy.shard_optimizer
    optimizer = states.optimizer / (data if zero else 1)
    return (states.parameters + states.gradients + optimizer) / parts


def _total(states: Memory) -> int:
    return states.parameters + states.gradients + states.optimizer


def estimated_seconds(lane: Lane, states: Memory, compute_s: float, device: Device) -> float:
    """An estimate of the seconds of an update: the order in which lanes are tried.

    Args:
        lane: A strategy on a mesh.
        states: Those of the unsharded model.
        compute_s: What an update computes, on all ranks together.
        device: Of each rank.
    """
    strategy, mesh = lane
    parts = mesh.tensor * mesh.pipeline
    world = mesh.replicate * mesh.shard * mesh.context * parts
    within = world <= device.ranks_per_node
    bandwidth = device.link_bandwidth if within else device.node_bandwidth
    held = _sharding(strategy)
    passes = 3 if held is not None and held.mode == "full" else 2
    passes *= 10 if offloads(strategy) else 1
    bubble = (mesh.pipeline - 1) / (_DEPTHS[0] * mesh.pipeline)
    trade = _TRADE * math.log2(mesh.tensor * mesh.context)
    links = passes * states.parameters / parts / bandwidth if world > parts else 0.0
    return compute_s / world * (1 + bubble + trade) + links


def micro_batches(question: Question, lane: Lane, rows: int, own: int) -> list[int]:
    """Micro-batches of a data rank, largest first, that divide the rows of an update.

    Args:
        question: What is asked.
        lane: A strategy on a mesh.
        rows: Of an update.
        own: Rows of a micro-batch of the program, on each rank; used if that is fixed.
    """
    strategy, mesh = lane
    data = mesh.replicate * mesh.shard
    if rows % data:
        return []
    local = rows // data
    if "accumulate" in question.fixed:
        allowed = [local // question.plan.accumulate]
    elif question.rows_fixed:
        whole = question.plan.batch == "global"
        allowed = [own // data if whole and own % data == 0 else 0 if whole else own]
    else:
        twos = (local & -local).bit_length()
        allowed = list(dict.fromkeys([*(local >> n for n in range(twos)), 1]))
    steps = strategy.microbatches or mesh.pipeline if isinstance(strategy, PP) else 1
    return [size for size in allowed if size and local % size == 0 and size % steps == 0]


def planned_trial(
    question: Question, lane: Lane, rows: int, size: int, recompute: tuple[str, ...]
) -> Trial:
    """The plan of a lane with this micro-batch, whose updates have these rows."""
    strategy, mesh = lane
    accumulate = rows // (mesh.replicate * mesh.shard * size)
    plan = attrs.evolve(
        question.plan, strategy=strategy, mesh=mesh, accumulate=accumulate, recompute=recompute
    )
    return plan, size


def deepened(question: Question, lane: Lane, rows: int) -> Lane:
    """A pipeline with as many micro-batches as keep its bubble small; any other lane unchanged."""
    strategy, mesh = lane
    local, left = divmod(rows, mesh.replicate * mesh.shard)
    if not isinstance(strategy, PP) or strategy.microbatches or "strategy" in question.fixed:
        return lane
    depths = (mesh.pipeline * depth for depth in _DEPTHS)
    count = next((count for count in depths if not left and local % count == 0), None)
    return attrs.evolve(strategy, microbatches=count), mesh


def held_memory(run: DryRun, plan: Plan) -> int:
    """Bytes of a device at the peak of a run; of a plan that offloads, without what the host has.

    A dry run counts both as one device.
    """
    memory = run.memory
    return max(run.peak - _total(memory), 0) if offloads(plan.strategy) else run.peak


def next_trials(
    question: Question,
    attempt: Trial,
    run: DryRun,
    memory: float,
    allowed: list[int],
    blocks: tuple[str, ...],
) -> list[Trial]:
    """What to try after a run that needs more than this memory: fewer rows, or recomputation.

    Activations grow with the rows of a micro-batch, so that the size that fits is known from one
    run. Smaller sizes than the largest that fits are slower.
    """
    plan, size = attempt
    held = 0 if offloads(plan.strategy) else _total(run.memory)
    peak = held_memory(run, plan)
    fixed = held + run.memory.buffers
    most = min(size / 2, size * (memory - fixed) / max(peak - fixed, 1))
    rows = size * plan.accumulate
    found: list[Trial] = []
    if smaller := next((other for other in allowed if other <= most), 0):
        found.append((attrs.evolve(plan, accumulate=rows // smaller), smaller))
    if blocks and not plan.recompute and "recompute" not in question.fixed and memory > fixed:
        found.append((attrs.evolve(plan, recompute=blocks), size))
    return found
