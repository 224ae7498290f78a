"""Models whose layers compute as a recipe says: what a strategy can carry, and the conversion."""

from torch import nn

from fxtrain.errors import PlanError
from fxtrain.ops.same_errors import fail_together
from fxtrain.precision import convert_layers, engine_region, quantized_layers, recipe_targets
from fxtrain.state import FSDP, TE, DistContext, Plan, Strategy


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
    elif (first := next(quantized_layers(module), None)) is not None:
        name, part, library = first
        problems.append(
            f"Plan(precision='fp8'): {name} of this model is quantised already, as "
            f"{library.format(part)}, and quantised weights compute in their own format. Use "
            f"precision='bf16', or pass the unquantised model."
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
    if isinstance(recipe, TE):
        problems += _compile_problems(recipe, plan, module)
    if not problems:
        try:
            recipe_targets(module, recipe)
        except PlanError as error:
            problems.append(str(error))
    return problems


def _compile_problems(recipe: TE, plan: Plan, module: nn.Module) -> list[str]:
    """What Transformer Engine does not allow of the plan's `compile`.

    Its region refuses delayed scaling where torch traces it, and torch does not trace the forward
    of its linear layers.
    """
    config = plan.compile
    if config is None:
        return []
    problems: list[str] = []
    whole = not config.blocks or type(module).__name__ in config.blocks
    if recipe.scaling == "delayed" and whole:
        problems.append(
            "TE(scaling='delayed') with Plan(compile=...): Transformer Engine does not support "
            "delayed scaling in a compiled model. Use scaling='current', compile the blocks alone "
            "with fx.Compile(blocks=...), or leave compile out."
        )
    if config.fullgraph:
        problems.append(
            "TE(...) with fx.Compile(fullgraph=True): torch does not trace the layers of "
            "Transformer Engine, so that there are several graphs. Leave fullgraph out."
        )
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
            _enter_region(module, recipe, ctx)


def _enter_region(module: nn.Module, recipe: TE, ctx: DistContext) -> None:
    """Run the module's forward in the library's region, with scales of all data ranks."""
    data = ctx.axis("data")
    group = data.comm.group if data.world_size > 1 else None
    module.forward = engine_region(module, recipe, group, module.forward)
