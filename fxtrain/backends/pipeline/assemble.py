"""Splits a module into the stages of a pipeline, and reassembles it."""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from torch import Tensor, nn
from torch import distributed as dist

from fxtrain.backends.core.initial_values import fill_full, record_initial_values
from fxtrain.backends.pipeline.partition import Partition, partition_of
from fxtrain.backends.pipeline.schedules import Pipeline
from fxtrain.backends.pipeline.sharded_stages import make_stages, reshard_stage
from fxtrain.backends.pipeline.stage import Stage
from fxtrain.backends.pipeline.stage_gradients import open_shared_groups
from fxtrain.backends.pipeline.weights import TensorSlot, full_tensor_of, tensor_slots
from fxtrain.errors import StepError
from fxtrain.ops.whole_tensors import is_sharded
from fxtrain.state import DistContext, Plan


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
    mine = {name for name in partition.stages if axis.rank in partition.holders(name)}
    fill_full(module, start, ctx, keep=mine, seed=plan.seed)
    names = [name for name, _ in module.named_parameters()]
    sums, opened = open_shared_groups(names, partition, ctx)
    places = tensor_slots(module)
    stages, twins = make_stages(module, partition, ctx, plan)
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
