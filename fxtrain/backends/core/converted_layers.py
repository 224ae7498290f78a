"""Models whose layers compute as a recipe says: what a strategy can carry, and the conversion."""

from torch import nn

from fxtrain._errors import PlanError
from fxtrain.ops.same_errors import raise_together
from fxtrain.precision import convert_layers, engine_region, recipe_targets
from fxtrain.state import FSDP, TE, DistContext, Plan, Strategy

__all__ = ["convert_as_planned", "recipe_problems"]


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
    if plan.quantize is not None:
        problems.append(
            f"Plan(precision='fp8', quantize=fx.{type(plan.quantize).__name__}(...)): quantised "
            f"weights compute in their own format. Use precision='bf16', or leave quantize out."
        )
    if getattr(recipe, "gather", "plan") == "fp8" and type(plan.strategy) is not FSDP:
        problems.append(
            f"Float8(gather='fp8') is the format in which FSDP gathers weights, and "
            f"{strategy.name} gathers none. Use gather='plan', or FSDP()."
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
    problem: Exception | None = None
    try:
        checked = not ctx.comm.simulated
        convert_layers(module, recipe, ctx.device, seed=plan.seed, checked=checked)
        if isinstance(recipe, TE):
            _enter_region(module, recipe, ctx)
    except Exception as error:
        problem = error
    raise_together(problem, ctx)


def _enter_region(module: nn.Module, recipe: TE, ctx: DistContext) -> None:
    """Run the module's forward in the library's region, with scales of all data ranks."""
    data = ctx.axis("data")
    group = data.comm.group if data.world_size > 1 else None
    module.forward = engine_region(module, recipe, group, module.forward)
