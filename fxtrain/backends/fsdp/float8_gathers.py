"""Weights that FSDP gathers in float8: their scales, which change with them."""

import importlib
from typing import Any

import torch
from torch import nn

from fxtrain.state import Float8, Plan


def gathered_in_float8(plan: Plan) -> Float8 | None:
    """The recipe of a plan that gathers weights in float8."""
    recipe = plan.precision.recipe
    return recipe if isinstance(recipe, Float8) and recipe.gather == "fp8" else None


def scale_before_forward(module: nn.Module) -> None:
    """Compute the scales of all weights in one all-reduce before each forward.

    Without it, each weight needs an all-reduce of its own before it is gathered. torchao suggests
    to do this after each optimizer step, but restored and averaged weights need new scales too.

    Effects:
        Adds a hook to the module, before torch's own.
    """
    compute = importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp

    scale: Any = torch.compiler.disable(compute)  # type: ignore[no-untyped-call]

    def before(*_: Any) -> None:
        scale(module)

    module.register_forward_pre_hook(before, prepend=True)
