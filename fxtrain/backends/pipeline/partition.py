"""Which stage of a pipeline owns which parameters. Pure: changes nothing, needs no ranks."""

import fnmatch
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch import nn

from fxtrain.backends.core.module_changes import unknown_patterns
from fxtrain.ops.block_names import block_names
from fxtrain.state import PP, Mesh, Plan


class ScheduleKind(NamedTuple):
    """One of torch's schedules.

    Attributes:
        name: Name of torch's class.
        stages: Minimum and maximum stages per rank; None for any.
        parts: Required micro-batches: any, one per stage, or rounds of equally many.
        v_shaped: Whether stages are placed over the ranks and back, instead of in a loop.
        splits: Whether it runs the backward of inputs and of weights separately.
        bubble: What is left of its bubble, as a share.
    """

    name: str
    stages: tuple[int, int | None] = (2, None)
    parts: str = "any"
    v_shaped: bool = False
    splits: bool = False
    bubble: float = 1.0


_V_SCHEDULES: Mapping[str, Any] = {"stages": (2, 2), "v_shaped": True, "splits": True}
SCHEDULES: Mapping[str, ScheduleKind] = {
    "gpipe": ScheduleKind("ScheduleGPipe", (1, 1)),
    "1f1b": ScheduleKind("Schedule1F1B", (1, 1), "stages"),
    "looped_bfs": ScheduleKind("ScheduleLoopedBFS"),
    "interleaved_1f1b": ScheduleKind("ScheduleInterleaved1F1B", parts="rounds"),
    "interleaved_zero_bubble": ScheduleKind(
        "ScheduleInterleavedZeroBubble", parts="rounds", splits=True, bubble=1 / 3
    ),
    "zbv_zero_bubble": ScheduleKind("ScheduleZBVZeroBubble", **_V_SCHEDULES, bubble=0.0),
    "dualpipe_v": ScheduleKind("ScheduleDualPipeV", parts="stages", **_V_SCHEDULES, bubble=2 / 3),
}


# Schedules for any number of micro-batches that place stages as another one does.
_ANY: Mapping[str, str] = {
    "1f1b": "gpipe",
    "interleaved_1f1b": "looped_bfs",
    "interleaved_zero_bubble": "looped_bfs",
    "dualpipe_v": "zbv_zero_bubble",
}


@attrs.frozen
class Partition:
    """How a model is split over the ranks of a pipeline.

    Attributes:
        starts: First module of every stage but the first, in order.
        ranks: Rank on the pipeline axis, by stage.
        parts: Micro-batches of a batch.
        stages: Name of every parameter and buffer to the stages that hold it. A parameter with
            several names has the stages of all of them.
    """

    starts: tuple[str, ...]
    ranks: tuple[int, ...]
    parts: int
    stages: Mapping[str, frozenset[int]]

    def on(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)

    def holders(self, name: str) -> tuple[int, ...]:
        """The ranks that hold a parameter or buffer, in order; the first one counts it."""
        return tuple(sorted({self.ranks[stage] for stage in self.stages[name]}))


def partition_of(module: nn.Module, config: PP, ranks: int) -> Partition:
    """The partition over some ranks of a module that has no problems."""
    count = ranks * _per_rank(config)
    starts = config.split or _balanced_starts(module, count)
    order = list(range(ranks))
    if SCHEDULES[config.schedule].v_shaped:
        order += order[::-1]
    return Partition(
        starts=starts,
        ranks=tuple(order[stage % len(order)] for stage in range(count)),
        parts=config.microbatches or count,
        stages=_stages(module, config, starts),
    )


def microbatch_count(plan: Plan, mesh: Mesh) -> int:
    """The micro-batches into which a plan splits a rank's batch."""
    config: PP = plan.strategy
    return config.microbatches or mesh.pipeline * _per_rank(config)


def bubble_share(plan: Plan, mesh: Mesh) -> float:
    """Time that a rank waits for other stages, as a share of its forward and backward.

    Sources: Narayanan et al., arXiv:2104.04473, section 2.2, for (p - 1) / m and interleaved
    schedules; Qi et al., arXiv:2401.10241, for zero-bubble schedules, where backward of weights
    fills two thirds; the README of DeepSeek's DualPipe for dualpipe_v.
    """
    config: PP = plan.strategy
    rounds = microbatch_count(plan, mesh) * _per_rank(config)
    return SCHEDULES[config.schedule].bubble * (mesh.pipeline - 1) / rounds


def parts_for(plan: Plan, partition: Partition, sizes: Sequence[int]) -> int:
    """Micro-batches for these rows on each data rank, equal on all; 0 if they do not divide.

    Example:
        >>> import fxtrain as fx
        >>> partition = Partition(starts=(), ranks=(0,), parts=4, stages={})
        >>> parts_for(fx.Plan(even="uneven"), partition, (9, 0, 6))
        3
    """
    if plan.even != "uneven":
        return 0 if any(size % partition.parts or not size for size in sizes) else partition.parts
    fits = range(partition.parts, 0, -1)
    return next(parts for parts in fits if not any(size % parts for size in sizes))


def fitting_kind(config: PP, ranks: int, parts: int) -> ScheduleKind:
    """The plan's schedule, or a simpler one if it does not support so few micro-batches."""
    return SCHEDULES[_ANY[config.schedule] if _unfit(config, ranks, parts) else config.schedule]


def pipeline_problems(module: nn.Module, plan: Plan, ranks: int) -> list[str]:
    """Problems with schedule, split points, micro-batches, or stages with nothing to train."""
    config: PP = plan.strategy
    problems = _count_problems(config, ranks)
    if not schedules_fit():
        problems.append(
            f"PP() needs a newer torch than {torch.__version__}, whose stages exchange integer "
            f"tensors with stages that expect floating-point ones. Install torch 2.13, or use "
            f"FSDP()."
        )
    parts = config.microbatches or ranks * _per_rank(config)
    if needed := _unfit(config, ranks, parts):
        problems.append(
            f"PP(schedule={config.schedule!r}, microbatches={parts}): this schedule needs {needed}."
        )
    modules = [name for name, _ in module.named_modules(remove_duplicate=False)]
    problems += unknown_patterns(config.split, modules, field="PP(split=...)", what="module")
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    problems += unknown_patterns(config.shared, names, field="PP(shared=...)")
    if not config.split:
        problems += _too_few_blocks(module, ranks * _per_rank(config))
    if problems:
        return problems
    return _inside_problems(module, plan, partition_of(module, config, ranks).starts)


def schedules_fit() -> bool:
    """Whether torch's schedules are those that this pipeline supports; 2.9 has older ones."""
    # Importing them takes half a second, and other plans do not need them.
    from torch.distributed.pipelining.schedules import PipelineScheduleSingle

    return "return_outputs" in inspect.signature(PipelineScheduleSingle.step).parameters


def _per_rank(config: PP) -> int:
    return config.stages_per_rank or SCHEDULES[config.schedule].stages[0]


def _count_problems(config: PP, ranks: int) -> list[str]:
    fewest, most = SCHEDULES[config.schedule].stages
    each = _per_rank(config)
    if each < fewest or (most is not None and each > most):
        words = f"exactly {fewest}" if most == fewest else f"at least {fewest}"
        return [
            f"PP(schedule={config.schedule!r}, stages_per_rank={each}): this schedule needs "
            f"{words} per rank. Omit stages_per_rank, or choose another schedule."
        ]
    if config.split and len(config.split) + 1 != ranks * each:
        return [
            f"PP(split=...) names {len(config.split)} modules, but {ranks} pipeline ranks with "
            f"{each} each run {ranks * each} stages. Name {ranks * each - 1}, or none to split "
            f"automatically."
        ]
    return []


def _unfit(config: PP, ranks: int, parts: int) -> str:
    """The number of micro-batches that the schedule needs; empty if so many are right."""
    needs, count = SCHEDULES[config.schedule].parts, ranks * _per_rank(config)
    if needs == "stages" and parts < count:
        return f"at least one micro-batch per stage, and there are {count}"
    rounds = max(1, parts // ranks)
    if needs == "rounds" and parts % rounds:
        return f"a multiple of its {rounds} rounds, such as {rounds * ranks}"
    return ""


def _too_few_blocks(module: nn.Module, count: int) -> list[str]:
    blocks = _blocks(module)
    if len(blocks) >= count:
        return []
    has = f"{len(blocks)} blocks ({', '.join(blocks[:4])})" if blocks else "no blocks"
    return [
        f"PP() splits {type(module).__name__} at its blocks into {count} stages, but it has "
        f"{has}. Use fewer stages, or name their first modules: PP(split=(...))."
    ]


def _inside_problems(module: nn.Module, plan: Plan, starts: tuple[str, ...]) -> list[str]:
    """Split points inside a module that must run as one."""
    whole = {name: "recompute" for name in plan.recompute}
    whole |= {} if plan.compile is None else {name: "compile" for name in plan.compile.blocks}
    return [
        f"PP splits before {start}, which is inside {name}, a {type(part).__name__} that "
        f"Plan.{whole[type(part).__name__]} names. Split before or after it."
        for start in starts
        for name, part in module.named_modules()
        if start.startswith(f"{name}.") and type(part).__name__ in whole
    ]


def _blocks(module: nn.Module) -> list[str]:
    """Names of the modules at which a model may be split, in order, none inside another."""
    kinds = block_names(module)
    blocks: list[str] = []
    for name, part in module.named_modules():
        # A module is followed directly by its parts.
        inside = bool(blocks) and name.startswith(f"{blocks[-1]}.")
        if type(part).__name__ in kinds and name and not inside:
            blocks.append(name)
    if blocks:
        return blocks
    for name, part in module.named_modules():
        if isinstance(part, nn.Sequential):
            return [f"{name}.{child}" if name else child for child, _ in part.named_children()]
    return []


def _balanced_starts(module: nn.Module, count: int) -> tuple[str, ...]:
    """First blocks of all stages but the first, chosen so that the largest stage is smallest."""
    blocks = _blocks(module)
    places = {name: place for place, name in enumerate(blocks)}
    weights = [0] * len(blocks)
    seen: set[int] = set()
    at = 0
    for name, part in module.named_modules():
        at = places.get(name, at)
        for parameter in part.parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                weights[at] += parameter.numel()
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        fits = len(_greedy_starts(weights, count, middle)) <= count
        low, high = (low, middle) if fits else (middle + 1, high)
    return tuple(blocks[index] for index in _greedy_starts(weights, count, low)[1:])


def _greedy_starts(weights: Sequence[int], count: int, most: int) -> list[int]:
    """Where stages of at most this many parameters begin, if each takes as many as it can."""
    starts, load = [0], 0
    for index, weight in enumerate(weights):
        due = len(weights) - index <= count - len(starts)  # one for each remaining stage
        if index and (load + weight > most or due):
            starts.append(index)
            load = 0
        load += weight
    return starts


def _stages(module: nn.Module, config: PP, starts: tuple[str, ...]) -> dict[str, frozenset[int]]:
    parts = list(module.named_modules(remove_duplicate=False))
    begin = {name: index for index, (name, _) in enumerate(parts)}
    splits = [begin[name] for name in starts]
    held: dict[str, set[int]] = {}
    names_of: dict[int, list[str]] = {}
    for index, (path, part) in enumerate(parts):
        end = index + sum(1 for _ in part.named_modules(remove_duplicate=False))
        first = sum(split <= index for split in splits)
        # The parameters of a module that several stages run belong to each of them.
        last = sum(split < end for split in splits)
        for name, tensor in (*part._parameters.items(), *part._buffers.items()):
            full = f"{path}.{name}" if path else name
            if tensor is not None:
                held[full] = set(range(first, last + 1))
                names_of.setdefault(id(tensor), []).append(full)
    for names in names_of.values():
        stages = {stage for name in names for stage in held[name]}
        if any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in config.shared):
            stages = set(range(len(starts) + 1))
        for name in names:
            held[name] = stages
    return {name: frozenset(stages) for name, stages in held.items()}
