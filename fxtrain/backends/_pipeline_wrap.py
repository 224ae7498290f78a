"""A module cut into the stages of a pipeline, and put together again."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from fxtrain.backends._pipeline_engine import Pipeline
from fxtrain.backends._pipeline_grads import open_sums
from fxtrain.backends._pipeline_plan import Layout, layout_of
from fxtrain.backends._pipeline_shard import make_stages, put_back
from fxtrain.backends._pipeline_stage import Stage
from fxtrain.backends._start import fill_whole, note_start
from fxtrain.state import DistContext, Plan

__all__ = ["into_stages"]


@attrs.frozen(eq=False)
class _Place:
    """Where a parameter or buffer stands in a module.

    Attributes:
        name: In the model.
        path: Of the module that has it.
        key: Its name there.
        held: That module's own parameters or buffers.
        like: A tensor without values like the one that stands there whole; one for all places
            of a tied parameter.
    """

    name: str
    path: str
    key: str
    held: dict[str, Any]
    like: Tensor


def into_stages(
    module: nn.Module, ctx: DistContext, plan: Plan
) -> tuple[Pipeline, Callable[[], None]]:
    """Cut a module into stages, of which this rank keeps its own.

    Effects:
        Parameters and buffers of other ranks' stages become None, in place; those of this
        rank's move to its device, with the values of rank 0, which are sent one by one, and of
        which it keeps its part.

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
    stages, twins = make_stages(module, layout, ctx, plan)
    _keep(places, layout, stages)
    engine = Pipeline(
        module=module, layout=layout, axis=axis, stages=stages, twins=twins, sums=sums
    )
    engine.train(module.training)

    def undo() -> None:
        for stage in stages.values():
            put_back(stage)
        _make_whole(places, layout, ctx)
        for group in opened:
            dist.destroy_process_group(group)
        opened.clear()

    return engine, undo


def _places(module: nn.Module) -> Iterator[_Place]:
    likes: dict[int, Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for held in (part._parameters, part._buffers):
            for key, tensor in held.items():
                if tensor is not None:
                    name = f"{path}.{key}" if path else key
                    like = likes.setdefault(id(tensor), _empty_like(tensor, torch.device("meta")))
                    yield _Place(name, path, key, held, like)


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _keep(places: list[_Place], layout: Layout, stages: dict[int, Stage]) -> None:
    """Leave in a module what the stages of this rank hold, as they hold it."""
    for place in places:
        found = [stage for index, stage in stages.items() if index in layout.stages[place.name]]
        if not found:
            place.held[place.key] = None
        elif isinstance(place.like, nn.Parameter):
            part = found[0].shell.get_submodule(place.path)
            place.held[place.key] = part._parameters[place.key]


def _make_whole(places: list[_Place], layout: Layout, ctx: DistContext) -> None:
    """Send every tensor from the first rank that holds it to those that do not."""
    axis = ctx.axis("pipeline")
    done: dict[int, Tensor] = {}
    for place in places:
        held, like = layout.holders(place.name), place.like
        if id(like) not in done:
            mine = axis.rank in held
            new = (
                _whole(place.held[place.key], ctx.device) if mine else _empty_like(like, ctx.device)
            )
            if len(held) < axis.world_size:
                dist.broadcast(new.detach(), axis.comm.ranks[held[0]], group=axis.comm.group)
            done[id(like)] = new
        place.held[place.key] = done[id(like)]


def _whole(tensor: Tensor, device: torch.device) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    full = tensor.detach().full_tensor()  # pyright: ignore[reportAttributeAccessIssue]
    return nn.Parameter(full.to(device), requires_grad=tensor.requires_grad)
