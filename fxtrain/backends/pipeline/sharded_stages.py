"""How a rank holds its stages on the other axes: layers split, parameters sharded."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fxtrain import _tree
from fxtrain.backends.core.device_mesh import DistributedParameters, device_mesh
from fxtrain.backends.core.module_changes import prepare_module
from fxtrain.backends.core.wrap_units import ignored_names, units
from fxtrain.backends.fsdp.apply_fully_shard import gather_precision, shard_parts
from fxtrain.backends.fsdp.strategy import shard_size
from fxtrain.backends.pipeline.fake_stages import OwnFakes
from fxtrain.backends.pipeline.partition import Partition
from fxtrain.backends.pipeline.stage import Stage
from fxtrain.backends.tensor import split_layers
from fxtrain.state import FSDP, PP, DistContext, Plan


@attrs.frozen(kw_only=True, eq=False)
class _Axes:
    """What `PP(stages=...)` requests for every stage.

    Attributes:
        plan: The plan, as FSDP reads it.
        mesh: Over all ranks.
        whole: Names of parameters that are not sharded.
        format: The dtype in which the others are gathered; None for their own.
        formats: The dtype of each of them, by name.
        distributed: DTensors by the id of the split parameter.
    """

    plan: Plan
    mesh: DeviceMesh
    whole: frozenset[str]
    format: torch.dtype | None
    formats: Mapping[str, torch.dtype]
    distributed: DistributedParameters = attrs.field(factory=dict)


def make_stages(
    module: nn.Module, partition: Partition, ctx: DistContext, plan: Plan
) -> tuple[dict[int, Stage], dict[int, Stage]]:
    """The stages of this rank, and value-free copies of those that are sharded.

    In a simulated world, where no other rank answers, also copies of the other ranks' stages.

    Effects:
        Opens groups of ranks that the context lacks. Parameters of the module do not change: the
        stages have others in their place where they are split or sharded.
    """
    config: PP = plan.strategy
    axes = None if config.stages is None else _axes(module, partition, ctx, plan)
    stages: dict[int, Stage] = {}
    twins: dict[int, Stage] = {}
    for index in partition.on(ctx.axis("pipeline").rank):
        stages[index] = stage = _split_stage(module, partition, index, ctx, axes)
        sharded = axes is not None and ctx.axis("data").world_size > 1
        prepare_module(stage.shell, plan, ctx, hooked=sharded)
        if axes is not None and sharded:
            # Split before the copy is sharded, so that it has the same parameters.
            twins[index] = _split_stage(module, partition, index, ctx, axes)
            _empty(twins[index], axes.formats)
            twins[index].prepare(partition, index)
            _shard(stage, partition, index, ctx, axes)
        else:
            stage.show()
        stage.prepare(partition, index)
    if ctx.comm.simulated:
        twins |= _fake_stages(module, partition, ctx, axes)
    return stages, twins


def reshard_stage(stage: Stage) -> None:
    """Free what a sharded stage has gathered, before its shards are written to."""
    for part in stage.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _axes(module: nn.Module, partition: Partition, ctx: DistContext, plan: Plan) -> _Axes:
    config: FSDP = plan.strategy.stages
    stage_plan = attrs.evolve(plan, strategy=config)
    # What several stages of a rank hold cannot belong to each of them.
    several = {
        n for n, stages in partition.stages.items() if len(partition.holders(n)) < len(stages)
    }
    whole = ignored_names(module, config) | several
    format = gather_precision(stage_plan).param_dtype if ctx.axis("data").world_size > 1 else None
    named = dict(module.named_parameters(remove_duplicate=False))
    sharded = [n for n, p in named.items() if n not in whole and p.is_floating_point()]
    return _Axes(
        plan=stage_plan,
        mesh=device_mesh(ctx, shard_size(ctx, config)),
        whole=frozenset(whole),
        format=format,
        formats={} if format is None else dict.fromkeys(sharded, format),
    )


def _split_stage(
    module: nn.Module, partition: Partition, index: int, ctx: DistContext, axes: _Axes | None
) -> Stage:
    if axes is None:
        return Stage(module, partition, index, ctx, {})
    stage = Stage(module, partition, index, ctx, axes.formats)
    config: FSDP = axes.plan.strategy
    if axes.format is not None and config.cast_inputs:
        # Not by torch: other stages' units as well, so that every stage knows the dtype it is sent.
        hook = functools.partial(_cast, axes.format)
        inside = (part for parts in units(stage.shell, config) for part in parts)
        for part in (stage.shell, *inside):
            part.register_forward_pre_hook(hook, with_kwargs=True)
    if config.tensor is not None:
        mesh = axes.mesh["tensor"]
        split_layers(stage.shell, mesh, config.tensor, own=stage.owns, distributed=axes.distributed)
    return stage


def _fake_stages(
    module: nn.Module, partition: Partition, ctx: DistContext, axes: _Axes | None
) -> dict[int, Stage]:
    """Copies of the stages that other ranks run."""
    if axes is not None:  # stages send full tensors, so layers need not be split
        config = attrs.evolve(axes.plan.strategy, tensor=None)
        axes = attrs.evolve(axes, plan=attrs.evolve(axes.plan, strategy=config))
    mine = partition.on(ctx.axis("pipeline").rank)
    twins: dict[int, Stage] = {}
    for index in set(range(len(partition.ranks))).difference(mine):
        twins[index] = _split_stage(module, partition, index, ctx, axes)
        _empty(twins[index], {} if axes is None else axes.formats)
        twins[index].prepare(partition, index)
    return twins


def _cast(format: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    def cast(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(format) if floating else leaf

    return _tree.map_leaves(cast, (args, kwargs))


def _empty(stage: Stage, formats: Mapping[str, torch.dtype]) -> None:
    """Replace a stage's parameters by fake tensors of the same shapes."""
    own = {id(parameter) for parameter in stage.own()}
    blanks = OwnFakes()
    fakes: dict[int, nn.Parameter] = {}
    for path, part in stage.shell.named_modules(remove_duplicate=False):
        for key, parameter in part._parameters.items():
            if parameter is None or id(parameter) not in own:
                continue
            name = f"{path}.{key}" if path else key
            if id(parameter) not in fakes:
                dtype = formats.get(name, parameter.dtype)
                fakes[id(parameter)] = _fake_parameter(parameter, dtype, blanks)
            part._parameters[key] = fakes[id(parameter)]


def _fake_parameter(like: nn.Parameter, dtype: torch.dtype, mode: OwnFakes) -> nn.Parameter:
    local: Any = getattr(like, "_local_tensor", like)
    with mode:
        fake: Any = torch.empty(local.shape, dtype=dtype, device=local.device)
    if isinstance(like, DTensor):
        fake = DTensor.from_local(
            fake,
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
    return nn.Parameter(fake, requires_grad=like.requires_grad)


def _shard(stage: Stage, partition: Partition, index: int, ctx: DistContext, axes: _Axes) -> None:
    """Make a stage the root of torch's fully_shard, which manages the stage's own parameters."""
    own = {id(parameter) for parameter in stage.own()}
    named = list(stage.shell.named_parameters(remove_duplicate=False))
    ignored = {p for name, p in named if id(p) not in own or name in axes.whole}
    parts = list(own_units(stage.shell, partition, index, axes.plan.strategy))
    stage.add_module("inside", stage.shell)
    config: FSDP = attrs.evolve(axes.plan.strategy, cast_inputs=False)
    shard_parts(stage, parts, ignored, axes.mesh, ctx, attrs.evolve(axes.plan, strategy=config))


def own_units(
    shell: nn.Module, partition: Partition, index: int, config: FSDP
) -> Iterator[list[nn.Module]]:
    """The units that run completely in this stage."""
    paths = {id(part): path for path, part in shell.named_modules()}
    for parts in units(shell, config):
        names = [
            f"{paths[id(part)]}.{name}" for part in parts for name, _ in part.named_parameters()
        ]
        left = [
            start
            for part in parts
            for start in partition.starts
            if start.startswith(f"{paths[id(part)]}.")
        ]
        if not left and all(partition.stages[name] == {index} for name in names):
            yield parts
