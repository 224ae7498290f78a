"""The layers that a plan quantizes or converts, around `fx.wrap`."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from fxtrain.errors import PlanError
from fxtrain.ops.same_errors import fail_together
from fxtrain.precision.quantizing import (
    is_quantized,
    quantize_layers,
    quantized_tensors,
    sharding_problem,
)
from fxtrain.precision.recipe_layers import convert_layers, engine_region, recipe_targets
from fxtrain.state import TE, DistContext, Plan, Strategy


def layer_problems(
    strategy: Strategy, ctx: DistContext, plan: Plan, module: nn.Module
) -> list[str]:
    """What does not fit of a plan and the layers that it converts, or that are quantized already.

    No traffic, the same on all ranks.
    """
    return [
        *_quantized_problems(strategy, ctx, plan, module),
        *_recipe_problems(strategy, ctx, plan, module),
    ]


def _recipe_problems(
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
            "Plan(precision='fp8'): quantized weights compute in their own format. Use "
            "precision='bf16', or the unquantized model."
        )
    if getattr(recipe, "gather", "plan") == "fp8" and not strategy.gathers_weights:
        problems.append(
            f"Float8(gather='fp8'): {strategy.name} gathers no weights. Use gather='plan', or "
            f"FSDP()."
        )
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


def _quantized_problems(
    strategy: Strategy, ctx: DistContext, plan: Plan, module: nn.Module
) -> list[str]:
    """What does not fit of a plan and a model with quantized weights."""
    problems: list[str] = []
    if plan.quantize is None and not is_quantized(module):
        return problems
    quantized_tensors(module)  # raises for weights that bitsandbytes packed
    split = strategy.splits_quantized and ctx.world_size > 1
    if split and (problem := sharding_problem(module, plan.quantize)) is not None:
        problems.append(f"Quantized weights under {strategy.name}: {problem}.")
    if not (strategy.splits_quantized or strategy.full_parameters) or (
        split and ctx.mesh.tensor > 1
    ):
        problems.append(
            f"{strategy.name} cannot split quantized weights here. Use DDP(), with a replica of "
            f"them on each rank, Single(), or FSDP() without a tensor axis."
        )
    if plan.local is not None:
        problems.append(
            "Replicas that train independently (Plan.local) average every parameter, which "
            "quantized ones do not allow. Leave local out."
        )
    return problems


@contextmanager
def layers_as_planned(
    module: nn.Module, ctx: DistContext, plan: Plan, strategy: Strategy, *, trains: bool
) -> Iterator[None]:
    """Around wrapping: quantize what the plan says, and undo that if wrapping fails.

    A streamed model gets quantized layers without memory: those of the plan, if its weights are
    on the meta device, and those of its files.

    Raises:
        PlanError: as `quantize_layers`, on every rank.
        CheckpointError: the quantized layers of the files do not fit the model, on every rank.
    """
    if plan.quantize is None and strategy.take_layers is None:
        yield
        return
    with ExitStack() as undo:
        with fail_together(ctx):
            if plan.quantize is not None:
                # Shards move to the device one unit at a time; the whole model may not fit there.
                split = strategy.splits_quantized and ctx.world_size > 1
                device = torch.device("cpu") if split else ctx.device
                undo.callback(quantize_layers(module, plan.quantize, device, trains=trains))
            if strategy.take_layers is not None:
                undo.callback(strategy.take_layers(module, plan))
        yield
        undo.pop_all()
