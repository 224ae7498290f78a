"""A module cut into the stages of a pipeline, and put together again."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch import distributed as dist

from fxtrain.backends._modules import prepare_module
from fxtrain.backends._pipeline_engine import Pipeline
from fxtrain.backends._pipeline_grads import open_sums
from fxtrain.backends._pipeline_plan import Layout, layout_of
from fxtrain.backends._pipeline_stage import Stage
from fxtrain.backends._start import fill_whole, note_start
from fxtrain.state import DistContext, Plan

__all__ = ["into_stages"]


@attrs.frozen(eq=False)
class _Place:
    """Where a parameter or buffer stands in a module."""

    name: str
    held: dict[str, Any]  # the module's own parameters or buffers
    key: str
    tensor: Tensor


def into_stages(
    module: nn.Module, ctx: DistContext, plan: Plan
) -> tuple[Pipeline, Callable[[], None]]:
    """Cut a module into stages, of which this rank keeps its own.

    Effects:
        Parameters and buffers of other ranks' stages become None, in place; those of this
        rank's move to its device, with the values of rank 0, which are sent one by one.

    Returns:
        What runs the stages, and a function that makes the module whole again, on all ranks of
        the pipeline at once.
    """
    axis = ctx.axis("pipeline")
    layout = layout_of(module, plan.strategy, axis.world_size)
    start = note_start(module, ctx)
    mine = {name for name in layout.stages if axis.rank in layout.holders(name)}
    fill_whole(module, start, ctx, keep=mine, seed=plan.seed)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    sums, opened = open_sums(trained, layout, ctx)
    places = list(_places(module))
    stages = {index: Stage(module, layout, index, ctx) for index in layout.on(axis.rank)}
    for index, stage in stages.items():
        prepare_module(stage.shell, plan)
        stage.prepare(layout, index)
        stage.train(module.training)
    for place in places:
        if place.name not in mine:
            place.held[place.key] = None
    engine = Pipeline(module=module, layout=layout, axis=axis, stages=stages, sums=sums)

    def undo() -> None:
        _make_whole(places, layout, ctx)
        for group in opened:
            dist.destroy_process_group(group)
        opened.clear()

    return engine, undo


def _places(module: nn.Module) -> Iterator[_Place]:
    for path, part in module.named_modules(remove_duplicate=False):
        for held in (part._parameters, part._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    yield _Place(f"{path}.{key}" if path else key, held, key, tensor)


def _make_whole(places: list[_Place], layout: Layout, ctx: DistContext) -> None:
    """Send every tensor from the first rank that holds it to those that do not."""
    axis = ctx.axis("pipeline")
    done: dict[int, Tensor] = {}
    for place in places:
        held, old = layout.holders(place.name), place.tensor
        if id(old) not in done:
            new = old
            if axis.rank not in held:
                new = torch.empty(old.shape, dtype=old.dtype, device=ctx.device)
                if isinstance(old, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=old.requires_grad)
            if len(held) < axis.world_size:
                dist.broadcast(new.detach(), axis.comm.ranks[held[0]], group=axis.comm.group)
            done[id(old)] = new
        place.held[place.key] = done[id(old)]
