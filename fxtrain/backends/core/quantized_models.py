"""Models with quantised weights: what a strategy can carry, and quantising as a plan says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fxtrain.models.quantized_loading import put_stored_layers
from fxtrain.models.tensor_sources import open_source
from fxtrain.ops.same_errors import fail_together
from fxtrain.precision import (
    is_quantized,
    packed_layer,
    quantize_layers,
    sharding_problem,
    stream_later,
)
from fxtrain.state import FSDP, DistContext, Offload, Plan, Strategy


def quantized_problems(
    strategy: Strategy, ctx: DistContext, plan: Plan, module: nn.Module
) -> list[str]:
    """What does not fit of a plan and a model with quantised or frozen weights."""
    problems: list[str] = []
    if plan.frozen == "digests" and not (strategy.full_parameters or strategy.splits_quantized):
        problems.append(
            f"Plan(frozen='digests') compares full parameters, and {strategy.name} may hold parts "
            f"of them. Use frozen='values', DDP() or Single()."
        )
    if plan.quantize is None and not is_quantized(module):
        return problems
    if (packed := packed_layer(module)) is not None:
        problems.append(
            f"wrap: bitsandbytes packed {packed} for the CPU in an evaluation, and unpacks it with "
            f"its scales in another order. Load the model again, and wrap it before it is "
            f"evaluated."
        )
    what = "A model with quantised weights"
    if plan.quantize is not None:
        what = f"Plan(quantize=fx.{type(plan.quantize).__name__}(...))"
    if strategy.splits_quantized:
        problems += _split_problems(strategy, ctx, plan, module, what)
    elif not strategy.full_parameters:
        problems.append(
            f"{what}: {strategy.name} cannot hold quantised weights on {ctx.world_size} ranks: "
            f"they cannot be split. Use DDP(), with a replica of them on each rank, or Single()."
        )
    if plan.local is not None:
        problems.append(
            f"{what}: replicas that train independently (Plan.local) average every parameter, "
            f"which quantised ones do not allow. Leave local out."
        )
    return problems


def _split_problems(
    strategy: Strategy, ctx: DistContext, plan: Plan, module: nn.Module, what: str
) -> list[str]:
    """What does not fit where quantised weights are split over ranks."""
    if ctx.world_size == 1:
        return []
    found = sharding_problem(module, plan.quantize)
    problems = [] if found is None else [f"{what} under {strategy.name}: {found}."]
    if ctx.mesh.tensor > 1:
        problems.append(
            f"{what} under {strategy.name}: layers cannot be split over the mesh's tensor axis as "
            f"well. Leave tensor out of fx.Mesh(...)."
        )
    return problems


@contextmanager
def quantized_as_planned(
    module: nn.Module, ctx: DistContext, plan: Plan, *, trains: bool
) -> Iterator[None]:
    """Around wrapping: quantise what the plan says, and undo that if wrapping fails.

    A streamed model gets quantised layers without memory: those of the plan, if its weights are
    on the meta device, and those of its files.

    Raises:
        PlanError: as `quantize_layers`, on every rank.
        CheckpointError: the quantised layers of the files do not fit the model, on every rank.
    """
    config = plan.strategy
    if plan.quantize is None and not isinstance(config, Offload):
        yield
        return
    undo: list[Callable[[], None]] = []
    try:
        with fail_together(ctx):
            if plan.quantize is not None:
                # Shards move to the device one unit at a time; the whole model may not fit there.
                split = isinstance(config, FSDP) and ctx.world_size > 1
                device = torch.device("cpu") if split else ctx.device
                undo.append(quantize_layers(module, plan.quantize, device, trains=trains)[1])
            if isinstance(config, Offload):
                if config.source is not None and not is_quantized(module):
                    with open_source(config.source) as found:
                        undo.append(put_stored_layers(config.source, found, module))
                undo.append(stream_later(module, torch.device("cpu")))
        yield
    except BaseException:
        for take_back in reversed(undo):
            take_back()
        raise
