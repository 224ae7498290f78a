"""Models with converted layers or quantised weights: what a strategy can carry, and the change."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fxtrain.errors import PlanError
from fxtrain.models.quantized_loading import put_stored_layers
from fxtrain.models.tensor_sources import open_source
from fxtrain.ops.same_errors import fail_together
from fxtrain.precision.plain_tensors import is_quantized, quantized_tensors, stream_later
from fxtrain.precision.quantizing import quantize_layers, sharding_problem
from fxtrain.precision.recipe_layers import convert_layers, recipe_targets
from fxtrain.precision.transformer_engine import engine_region
from fxtrain.state import FSDP, TE, DistContext, Offload, Plan, Strategy


def recipe_problems(
    strategy: Strategy, ctx: DistContext, plan: Plan, module: nn.Module
) -> list[str]:
    """What does not fit of a plan with precision="fp8". No traffic, equal on all ranks."""
    recipe = plan.precision.recipe
    if recipe is None:
        return []
    problems: list[str] = []
    if not strategy.converts_layers:
        problems.append(
            f"{strategy.name} does not support precision='fp8', for which layers are converted "
            f"before they are wrapped. Use precision='bf16', or Single(), DDP() or FSDP()."
        )
    if plan.quantize is not None or is_quantized(module):
        problems.append(
            "Plan(precision='fp8'): quantised weights compute in their own format. Use "
            "precision='bf16', or the unquantised model."
        )
    if getattr(recipe, "gather", "plan") == "fp8" and type(plan.strategy) is not FSDP:
        problems.append("Float8(gather='fp8'): only FSDP gathers weights. Use gather='plan'.")
    if isinstance(recipe, TE) and ctx.mesh.tensor > 1:
        problems.append(
            "TE(...): Transformer Engine splits layers over ranks by its own means, and not by "
            "FSDP(tensor=...). Use Float8(...), or omit the tensor axis."
        )
    if not problems:
        try:
            recipe_targets(module, recipe)
        except PlanError as error:
            problems.append(str(error))
    return problems


def convert_as_planned(module: nn.Module, ctx: DistContext, plan: Plan) -> None:
    """Convert the layers that the plan's recipe names; `wrap` reverts that as all it changes.

    Raises:
        PlanError: as `convert_layers`, on every rank.
    """
    recipe = plan.precision.recipe
    if recipe is None:
        return
    with fail_together(ctx):
        checked = not ctx.comm.simulated
        convert_layers(module, recipe, ctx.device, seed=plan.seed, checked=checked)
        if isinstance(recipe, TE):
            # In the library's region, with scales of all data ranks.
            data = ctx.axis("data")
            group = data.comm.group if data.world_size > 1 else None
            module.forward = engine_region(module, recipe, group, module.forward)


def quantized_problems(
    strategy: Strategy, ctx: DistContext, plan: Plan, module: nn.Module
) -> list[str]:
    """What does not fit of a plan and a model with quantised or frozen weights."""
    problems: list[str] = []
    if plan.frozen == "digests" and not (strategy.full_parameters or strategy.splits_quantized):
        problems.append(
            f"Plan(frozen='digests') needs full parameters, and {strategy.name} may hold parts of "
            f"them."
        )
    if plan.quantize is None and not is_quantized(module):
        return problems
    quantized_tensors(module)  # raises for weights that bitsandbytes packed
    split = strategy.splits_quantized and ctx.world_size > 1
    if split and (problem := sharding_problem(module, plan.quantize)) is not None:
        problems.append(f"Quantised weights under {strategy.name}: {problem}.")
    if not (strategy.splits_quantized or strategy.full_parameters) or (
        split and ctx.mesh.tensor > 1
    ):
        problems.append(
            f"{strategy.name} cannot split quantised weights here. Use DDP(), with a replica of "
            f"them on each rank, Single(), or FSDP() without a tensor axis."
        )
    if plan.local is not None:
        problems.append(
            "Replicas that train independently (Plan.local) average every parameter, which "
            "quantised ones do not allow. Leave local out."
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
                    with open_source(config.source) as source:
                        undo.append(put_stored_layers(config.source, source, module))
                undo.append(stream_later(module, torch.device("cpu")))
        yield
    except BaseException:
        for take_back in reversed(undo):
            take_back()
        raise
