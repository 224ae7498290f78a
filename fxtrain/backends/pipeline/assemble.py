"""Splits a module into the stages of a pipeline, and reassembles it.

On the other axes, the layers of a stage may be split, and its parameters sharded.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxtrain import _tree
from fxtrain.backends.core.device_mesh import DistributedParameters, device_mesh
from fxtrain.backends.core.initial_values import fill_full, record_initial_values
from fxtrain.backends.core.module_changes import prepare_module
from fxtrain.backends.fsdp.apply_fully_shard import (
    gather_precision,
    ignored_parameters,
    shard_parts,
    shard_size,
    units,
)
from fxtrain.backends.pipeline.partition import Partition, partition_of
from fxtrain.backends.pipeline.schedules import Pipeline
from fxtrain.backends.pipeline.stage import OwnFakes, Stage, reshard_stage
from fxtrain.backends.pipeline.weights import (
    TensorSlot,
    full_tensor_of,
    open_shared_groups,
    tensor_slots,
)
from fxtrain.backends.tensor import split_layers
from fxtrain.errors import StepError
from fxtrain.ops.whole_tensors import is_sharded, local_part
from fxtrain.state import FSDP, PP, DistContext, Plan


def split_into_stages(
    module: nn.Module, ctx: DistContext, plan: Plan
) -> tuple[Pipeline, Callable[[], None]]:
    """Split a module into stages, of which this rank keeps its own.

    Effects:
        Parameters and buffers of other ranks' stages become None, in place. Those of this rank
        are moved to its device, with rank 0's values, which are sent one by one; this rank keeps
        its part of them.

    Returns:
        The engine that runs the stages, and a function that makes the module complete again, on
        all ranks of the pipeline at once.
    """
    axis = ctx.axis("pipeline")
    partition = partition_of(module, plan.strategy, axis.world_size)
    start = record_initial_values(module, ctx)
    local = {name for name in partition.stages if axis.rank in partition.holders(name)}
    fill_full(module, start, ctx, keep=local, seed=plan.seed)
    names = [name for name, _ in module.named_parameters()]
    sums, opened = open_shared_groups(names, partition, ctx)
    places = tensor_slots(module)
    stages, twins = _make_stages(module, partition, ctx, plan)
    _keep(places, partition, stages)
    engine = Pipeline(
        module=module,
        partition=partition,
        axis=axis,
        stages=stages,
        fake_stages=twins,
        shared_groups=sums,
        places=places,
    )
    engine.train(module.training)
    _refuse_forward(module, engine)

    def undo() -> None:
        for stage in stages.values():
            reshard_stage(stage)
        _restore_full_tensors(engine, ctx)
        for group in opened:
            dist.destroy_process_group(group)
        opened.clear()

    return engine, undo


def _keep(places: Iterable[TensorSlot], partition: Partition, stages: dict[int, Stage]) -> None:
    """Reduce a module to the parameters and buffers of this rank's stages, as they hold them."""
    for place in places:
        holders = [
            stage for index, stage in stages.items() if index in partition.stages[place.name]
        ]
        if not holders:
            place.held[place.key] = None
        elif isinstance(place.like, nn.Parameter):
            part = holders[0].shell.get_submodule(place.path)
            place.held[place.key] = part._parameters[place.key]


def _restore_full_tensors(engine: Pipeline, ctx: DistContext) -> None:
    """Give every rank the full value of every tensor, under its original names."""
    done: dict[int, Tensor] = {}
    for place in engine.places:
        if id(place.like) not in done:
            value = full_tensor_of(place, engine.partition, engine.axis, ctx.device)
            here = place.held[place.key]
            if here is not None and not is_sharded(here):
                value = here  # the same object, which others may reference
            elif isinstance(place.like, nn.Parameter):
                value = nn.Parameter(value, requires_grad=place.like.requires_grad)
            done[id(place.like)] = value
        place.held[place.key] = done[id(place.like)]


def _refuse_forward(module: nn.Module, engine: Pipeline) -> None:
    """Make modules without their parameters raise when called."""
    lacking = {place.path for place in engine.places if place.held[place.key] is None}
    parts = {path: module.get_submodule(path) for path in lacking | {""}}
    for path, part in parts.items():
        refuse = functools.partial(_refuse, engine, path)
        part.forward = functools.wraps(part.forward)(refuse)


def _refuse(engine: Pipeline, path: str, *_: Any, **__: Any) -> NoReturn:
    stages = ", ".join(map(str, engine.partition.on(engine.axis.rank)))
    raise StepError(
        f"PP: {f'model.module.{path}' if path else 'model.module'} was called, but this rank has "
        f"only stage {stages} of {len(engine.partition.ranks)} of the model. To evaluate, call the "
        f"wrapped model under torch.no_grad(); for generate() and other functions of the module, "
        f"use `with fx.gathered(model) as net: net.generate(...)`."
    )


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


def _make_stages(
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


def _axes(module: nn.Module, partition: Partition, ctx: DistContext, plan: Plan) -> _Axes:
    config: FSDP = plan.strategy.stages
    stage_plan = attrs.evolve(plan, strategy=config)
    # What several stages of a rank hold cannot belong to each of them.
    several = {
        n for n, stages in partition.stages.items() if len(partition.holders(n)) < len(stages)
    }
    whole = ignored_parameters(module, config) | several
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
        for part in (stage.shell, *units(stage.shell, config)):
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
    local = partition.on(ctx.axis("pipeline").rank)
    twins: dict[int, Stage] = {}
    for index in set(range(len(partition.ranks))).difference(local):
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
    local: Any = local_part(like)
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
    # Registered only here: torch shards the parameters that it finds among the stage's modules.
    stage.add_module("inside", stage.shell)
    # `_split_stage` has added hooks that cast inputs.
    config: FSDP = attrs.evolve(axes.plan.strategy, cast_inputs=False)
    shard_parts(stage, parts, ignored, axes.mesh, ctx, attrs.evolve(axes.plan, strategy=config))


def own_units(
    shell: nn.Module, partition: Partition, index: int, config: FSDP
) -> Iterator[nn.Module]:
    """The units that run completely in this stage."""
    paths = {id(part): path for path, part in shell.named_modules()}
    for part in units(shell, config):
        path = paths[id(part)]
        names = [f"{path}.{name}" for name, _ in part.named_parameters()]
        cut = any(start.startswith(f"{path}.") for start in partition.starts)
        if not cut and all(partition.stages[name] == {index} for name in names):
            yield part
