"""Which plans could train a model on a number of ranks, and what each needs at least."""

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import nn

from fxtrain.backends.wrapping import problems_of, unwrap
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
from fxtrain.state.registry import strategy_of

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


def data_ranks(plan: Plan) -> int:
    """The ranks that have rows of their own, of a plan with a mesh."""
    mesh = plan.mesh or Mesh()
    return mesh.replicate * mesh.shard


def survey(model: Wrapped, question: Question) -> dict[str, Any]:
    """What decides which plans a model allows, as plain data.

    Args:
        model: As one rank wraps it. It is unwrapped.
        question: What is asked.

    Returns:
        The user's plan; class names of blocks and their number; the number of experts; rows of a
        micro-batch and of an update; and by the number of a plan of `lanes`, why `fx.wrap` refuses
        it.
    """
    mesh = resolve_mesh(question.plan.mesh or Mesh(), question.world)
    plan = model.plan if question.own_plan else question.plan
    plan = attrs.evolve(plan, mesh=mesh)
    question = attrs.evolve(question, plan=plan)
    names = block_names(model.module)
    modules = list(model.module.modules())
    size = sum(model.window.sizes)
    each = 1 if plan.batch == "global" else data_ranks(plan)
    about: dict[str, Any] = {
        "plan": unstructure(plan),
        "blocks": list(names),
        "depth": sum(type(part).__name__ in names for part in modules),
        "experts": max(int(getattr(part, "num_experts", 0) or 0) for part in modules),
        "rows": size,
        "update": question.rows or size * plan.accumulate * each,
    }
    found = enumerate(lanes(question, about))
    module = unwrap(model)  # whose layers are those that `fx.wrap` is given
    refused = {str(n): _refusal(question, lane, module) for n, lane in found}
    return {**about, "refused": {n: problem for n, problem in refused.items() if problem}}


def _refusal(question: Question, lane: Plan, module: nn.Module) -> str:
    """The first line of why `fx.wrap` refuses a plan; empty if it does not."""
    world, node = question.world, question.node
    ctx = DistContext(world_size=world, local_world_size=min(world, node), mesh=lane.mesh or Mesh())
    problems = problems_of(strategy_of(lane.strategy), simulated(ctx), lane, module)
    return problems[0].splitlines()[0] if problems else ""


def lanes(question: Question, about: Mapping[str, Any]) -> list[Plan]:
    """Plans with different strategies and meshes, the user's own first; a lane is one of them.

    Their micro-batches and recomputation follow from dry runs.
    """
    own, fixed = question.plan, question.fixed
    given = resolve_mesh(own.mesh or Mesh(), question.world)
    pairs: list[tuple[Any, Mesh]] = [(own.strategy, given)]
    for mesh in [given] if "mesh" in fixed else _meshes(question, about["depth"]):
        kept = "strategy" in fixed
        of_mesh = [own.strategy] if kept else _strategies(own.strategy, about, mesh)
        pairs += [(strategy, mesh) for strategy in of_mesh]
    once: dict[Any, Plan] = {}
    for strategy, mesh in pairs:
        lane = attrs.evolve(own, strategy=strategy, mesh=mesh)
        # Strategies that hold the same parts on each data rank do the same with both meshes.
        shards = strategy_of(strategy).shards(lane, mesh)
        once.setdefault((strategy, shards, mesh.context, mesh.tensor, mesh.pipeline), lane)
    return list(once.values())


def _strategies(own: Any, about: Mapping[str, Any], mesh: Mesh) -> Iterator[Any]:
    """The strategies that use every axis of a mesh, with the settings of the user's own."""
    given = {type(own): own}
    ddp, pp = given.get(DDP, DDP()), given.get(PP, PP())
    held = given.get(FSDP) or pp.stages or FSDP()
    data = mesh.replicate * mesh.shard
    for mode in ("full", "none"):
        sharded = mode == "full"
        # On context ranks alone, parameters are replicas or shards.
        if (mesh.shard > 1) != sharded and not (data == 1 < mesh.context and mesh.pipeline == 1):
            continue
        tensor = (held.tensor or TP()) if mesh.tensor > 1 else None
        fsdp = attrs.evolve(held, mode=mode, shard=None, tensor=tensor, expert=None, offload=False)
        if mesh.pipeline > 1:
            stages = fsdp if sharded or tensor else None
            local, left = divmod(about["update"], data)
            counts = (mesh.pipeline * depth for depth in _DEPTHS if not left)
            deep = next((count for count in counts if local % count == 0), None)
            yield attrs.evolve(pp, stages=stages, microbatches=pp.microbatches or deep)
        elif tensor:
            yield fsdp
        elif sharded:
            yield fsdp
            yield attrs.evolve(fsdp, mode="grads_and_optimizer")
            for degree in _DEGREES[1:]:
                if about["experts"] and about["experts"] % degree == 0:
                    yield attrs.evolve(fsdp, expert=degree)
            yield attrs.evolve(fsdp, offload=True)
        else:
            yield ddp
            if data > 1:
                yield attrs.evolve(ddp, shard_optimizer=True)


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


def _states(memory: Memory) -> int:
    return memory.parameters + memory.gradients + memory.optimizer


def _parts(lane: Plan) -> int:
    """The ranks that split layers and stages of one replica."""
    return lane.mesh.tensor * lane.mesh.pipeline if lane.mesh else 1


def needs_no_split(lane: Plan, whole: Memory, question: Question, memory: float, rows: int) -> bool:
    """Whether a plan splits the work of a row over ranks without need.

    Each rank's own rows cost less traffic, as long as there are enough rows and a device holds
    twice the parameters, gradients and optimizer states of the unsharded model, `whole`.
    """
    chosen = {"strategy", "mesh"} & question.fixed or lane.strategy == question.plan.strategy
    needed = rows < question.world or 2 * _states(whole) > memory
    return _parts(lane) > 1 and not chosen and not needed


def least_memory(lane: Plan, whole: Memory) -> float:
    """Bytes of parameters, gradients and optimizer states on each rank, at least."""
    strategy = strategy_of(lane.strategy)
    if strategy.in_host_memory(lane):
        return 0.0
    shards, of_optimizer = strategy.shards(lane, lane.mesh or Mesh())
    held = (whole.parameters + whole.gradients) / shards + whole.optimizer / of_optimizer
    return held / _parts(lane)


def estimated_seconds(lane: Plan, whole: Memory, compute_s: float, device: Device) -> float:
    """An estimate of the seconds of an update: the order in which plans are tried.

    Args:
        lane: A plan.
        whole: Memory of the unsharded model.
        compute_s: What an update computes, on all ranks together.
        device: Of each rank.
    """
    mesh, parts = lane.mesh or Mesh(), _parts(lane)
    world = math.prod(mesh.sizes.values())
    bandwidth = device.link_bandwidth
    if world > device.ranks_per_node:
        bandwidth = device.node_bandwidth
    strategy = strategy_of(lane.strategy)
    passes = 3 if "forward" in strategy.overlapped(lane) else 2
    links = passes * whole.parameters / parts / bandwidth if world > parts else 0.0
    links *= 10 if strategy.in_host_memory(lane) else 1
    bubble = (mesh.pipeline - 1) / (_DEPTHS[0] * mesh.pipeline)
    trade = _TRADE * math.log2(mesh.tensor * mesh.context)
    return compute_s / world * (1 + bubble + trade) + links


def micro_batches(question: Question, lane: Plan, rows: int, own: int) -> list[int]:
    """Micro-batches of a data rank, largest first, that divide the rows of an update.

    Args:
        question: What is asked.
        lane: A plan.
        rows: Of an update.
        own: Rows of a micro-batch of the program, on each rank; used if that is fixed.
    """
    data = data_ranks(lane)
    local, left = divmod(rows, data)
    if left:
        return []
    if "accumulate" in question.fixed:
        allowed = [local // question.plan.accumulate]
    elif question.rows_fixed:
        allowed = [own]
        if question.plan.batch == "global":
            allowed = [own // data] if own % data == 0 else []
    else:
        twos = (local & -local).bit_length()
        allowed = list(dict.fromkeys([*(local >> n for n in range(twos)), 1]))
    steps = strategy_of(lane.strategy).parts(lane, lane.mesh or Mesh())
    return [size for size in allowed if size and local % size == 0 and size % steps == 0]


def with_rows(lane: Plan, rows: int, size: int) -> Trial:
    """A plan with micro-batches of this size, whose updates have these rows."""
    return attrs.evolve(lane, accumulate=rows // (data_ranks(lane) * size)), size


def held_memory(run: DryRun, plan: Plan) -> int:
    """Bytes of a device at the peak of a run; of a plan that offloads, without what the host has.

    A dry run counts both as one device.
    """
    on_host = strategy_of(plan.strategy).in_host_memory(plan)
    return max(run.peak - _states(run.memory), 0) if on_host else run.peak


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
    peak = held_memory(run, plan)
    fixed = peak - run.peak + _states(run.memory) + run.memory.buffers
    most = min(size / 2, size * (memory - fixed) / max(peak - fixed, 1))
    found: list[Trial] = []
    if smaller := next((other for other in allowed if other <= most), 0):
        found.append((attrs.evolve(plan, accumulate=size * plan.accumulate // smaller), smaller))
    if blocks and not plan.recompute and "recompute" not in question.fixed and memory > fixed:
        found.append((attrs.evolve(plan, recompute=blocks), size))
    return found
