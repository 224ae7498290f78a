"""`fxtrain compare-precision`: what plans cost in accuracy, on a model and data of the user."""

import importlib
import math
from pathlib import Path
from typing import Any

import attrs
import click

from fxtrain._other_names import closest
from fxtrain.cli.output import NOT_NEGATIVE, as_json, option, picture_option, report, save_picture
from fxtrain.errors import PlanError
from fxtrain.state import TE, Plan, Precision, read_plan
from fxtrain.state.precision import FORMATS, recipe_of

RECIPES = (
    "float8", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mx", "mxfp8", "mxfp4", "nvfp4", "te",
)  # fmt: skip
WEIGHTS = ("bnb8", "bnb4", "torchao")

_PLAN = (
    "a plan to compare: a file, a dtype such as bf16, a recipe of float8 such as rowwise or mxfp8, "
    "or a format of weights: bnb8, bnb4, torchao"
)


@click.command("compare-precision")
@click.argument("case", metavar="MODULE:FUNCTION")
@option("--plan plans", _PLAN, metavar="FILE|NAME", multiple=True, required=True)
@option("--emulate", "emulate recipes of float8 that are named, slowly", is_flag=True)
@option("--reference", "the plan to compare with; fp32 by default", metavar="FILE")
@option("--updates", "also train N updates", NOT_NEGATIVE, "N", default=0)
@option("--layers", "layers to show", NOT_NEGATIVE, "N", default=5)
@picture_option("--picture", "draw errors and losses")
@as_json
def COMPARE(
    case: str,
    plans: tuple[str, ...],
    emulate: bool,  # noqa: FBT001
    reference: str | None,
    updates: int,
    layers: int,
    picture: str | None,
) -> None:
    """Compare what a model computes under several plans.

    FUNCTION takes no arguments and returns an fx.quality.Case: the model, the data, and with
    --updates the loss and the optimizer. Shown are errors by layer and of the outputs, the best
    entry or the cosine where the case says what outputs are, bytes of the weights, and losses.
    """
    from fxtrain.models.code_models import import_function

    named = {word: plan_of(word, emulate=emulate) for word in plans}
    base = Plan() if reference is None else read_plan(reference)
    quality = importlib.import_module("fxtrain.quality")
    function = import_function(case, returns="an fx.quality.Case")
    built = function() if callable(function) else function
    if not isinstance(built, quality.Case):
        raise PlanError(
            f"{case} is or returns a {type(built).__name__}. Name a function without arguments "
            f"that returns an fx.quality.Case."
        )
    with importlib.import_module("fxtrain.ops").detect() as ctx:
        comparison = quality.compare(built, named, ctx, reference=base, updates=updates)
    if picture is not None:
        save_picture(quality.plot(comparison), picture)
    report(_finite(attrs.asdict(comparison)), quality.table(comparison, layers=layers))


def plan_of(word: str, *, emulate: bool = False) -> Plan:
    """The plan in a file, or what the short name of a dtype, a recipe or a format stands for."""
    if word in FORMATS:
        plan = Plan(precision=word)  # type: ignore[arg-type]
    elif word in WEIGHTS:
        plan = Plan(quantize=word)  # type: ignore[arg-type]
    elif word in RECIPES:
        plan = Plan(precision=Precision(compute="fp8", recipe=recipe_of(word)))
    elif Path(word).suffix:
        return read_plan(word)
    else:
        names = (*FORMATS, *RECIPES, *WEIGHTS)
        raise PlanError(
            f"--plan {word}: neither a name nor a file.{closest(word, names)} Names are "
            f"{', '.join(names)}; a file with a plan ends in .toml, .yaml or .json."
        )
    recipe = plan.precision.recipe
    if not emulate or recipe is None:
        return plan
    if isinstance(recipe, TE):
        raise PlanError(f"--plan {word} --emulate: Transformer Engine cannot be emulated.")
    chosen = attrs.evolve(recipe, emulate=True)
    return Plan(precision=attrs.evolve(plan.precision, recipe=chosen))


def _finite(value: Any) -> Any:
    """JSON has no infinity: an exact layer has no signal-to-noise ratio there."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
