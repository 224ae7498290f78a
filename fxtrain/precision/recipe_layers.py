"""Linear layers that compute as a recipe says: chosen, and converted in place.

A converted layer is the user's module with another class, so that its parameters, names, hooks and
the references to it stay as they are.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fxtrain.errors import PlanError
from fxtrain.precision.library import LayerFormat, quiet
from fxtrain.precision.targets import Targets, choose_linears
from fxtrain.precision.torchao_layers import LOGGERS, has_float8, import_torchao
from fxtrain.precision.transformer_engine import TE_LAYERS
from fxtrain.state import MX, TE, Float8, Recipe

_NEEDED_BY = "Plan(precision=fx.Precision(compute='fp8', recipe=...))"


def _blank(part: Any) -> nn.Linear:
    return nn.Linear(part.in_features, part.out_features, bias=False, device="meta")


def _modules() -> Any:
    import_torchao(_NEEDED_BY)
    with quiet(*LOGGERS):
        return importlib.import_module("fxtrain.precision.torchao_modules")


# float8.


def _check_float8(recipe: Float8, device: torch.device) -> str | None:
    _modules()
    if recipe.emulate or has_float8(device):
        return None
    return (
        f"Float8(scaling={recipe.scaling!r}) needs a GPU with float8 matrix products: CUDA 8.9 or "
        f"newer (L4, H100, B200), MI300 or an Intel GPU; this device is {device.type}. Use "
        f"precision='bf16', or Float8(emulate=True) to try the plan out here, slowly."
    )


def _float8_config(recipe: Float8, *, gather: bool = False) -> Any:
    config = importlib.import_module("torchao.float8").Float8LinearConfig.from_recipe_name(
        recipe.scaling
    )
    changes = {"emulate": recipe.emulate, "pad_inner_dim": recipe.pad}
    return dataclasses.replace(config, **changes, enable_fsdp_float8_all_gather=gather)


def _like_float8(part: nn.Linear, recipe: Float8, device: torch.device, seed: int) -> nn.Module:
    modules = _modules()
    layer = modules.convert_to_float8_training(_blank(part), config=_float8_config(recipe))
    if device.type != "cuda":  # torchao's own layer only knows autocast of CUDA
        layer.__class__ = modules.Float8Linear
    return layer


def gather_in_float8(module: nn.Module, recipe: Float8) -> None:
    """Have FSDP cast shards of converted layers to float8 before it gathers them.

    Effects:
        Replaces the weights of converted layers by tensors of torchao that cast themselves, over
        the same memory. To be called before the model is split.
    """
    modules = _modules()
    config = _float8_config(recipe, gather=True)
    for part in module.modules():
        if isinstance(part, modules.float8_linear.Float8Linear):
            plain, layer = _blank(part), part
            plain.weight = layer.get_parameter("weight")
            layer.weight = modules.convert_to_float8_training(plain, config=config).weight


# Microscaling formats.


def _check_mx(recipe: MX, device: torch.device) -> str | None:
    _modules()
    blackwell = device.type == "cuda" and torch.version.hip is None
    if recipe.emulate or (blackwell and torch.cuda.get_device_capability(device) >= (10, 0)):
        return None
    advice = "Use precision='bf16'"
    if recipe.format != "nvfp4":
        advice += f", or MX(format={recipe.format!r}, emulate=True) to try the plan out, slowly"
    return (
        f"MX(format={recipe.format!r}) needs a GPU with products in microscaling formats: CUDA "
        f"10.0 or newer (B200, GB200); this device is {device.type}. {advice}."
    )


def _like_mx(part: nn.Linear, recipe: MX, device: torch.device, seed: int) -> nn.Module:
    modules = _modules()
    if recipe.format != "nvfp4":
        return modules.MXLinear(
            part.in_features, part.out_features, format=recipe.format,
            high_precision=recipe.grad_weight == "bf16", emulate=recipe.emulate,
        )  # fmt: skip
    draws = torch.Generator().manual_seed(seed)
    signs = (torch.randint(0, 2, (16,), generator=draws, device="cpu") * 2 - 1).tolist()
    home = importlib.import_module("torchao.prototype.moe_training.nvfp4_training.nvfp4_training")
    layer = home.NVFP4Linear(
        part.in_features, part.out_features, bias=part.bias is not None,
        device=device, rht_sign_vector=signs,
    )  # fmt: skip
    # As attributes, not as buffers, which would be in checkpoints: the seed gives the same values.
    key = torch.randint(2**62, (1,), generator=draws, device="cpu").to(device)
    vars(layer).update(_sr_seed=key, _rht_sign_vector=layer._rht_sign_vector)
    return layer


_BY_RECORD: Mapping[type, LayerFormat] = {
    Float8: LayerFormat(check=_check_float8, multiple=lambda _: 16, like=_like_float8),
    MX: LayerFormat(
        check=_check_mx,
        multiple=lambda recipe: 128 if recipe.format == "nvfp4" else 32,
        like=_like_mx,
    ),
    TE: TE_LAYERS,
}


def recipe_targets(module: nn.Module, recipe: Recipe) -> Targets:
    """The linear layers that a recipe converts, and why it skips the others. Imports nothing.

    Raises:
        PlanError: a pattern or class name matches nothing, or no layer is left.
    """
    unit = _BY_RECORD[type(recipe)].multiple(recipe)

    def reason(part: nn.Linear) -> str | None:
        sizes = (part.in_features, part.out_features)
        if min(sizes) < recipe.min_features:
            return f"its size {sizes} is below min_features={recipe.min_features}"
        if any(size % unit for size in sizes):
            return f"its size {sizes} is not divisible by {unit}"
        return None

    return choose_linears(module, recipe, reason)


def convert_layers(
    module: nn.Module, recipe: Recipe, device: torch.device, *, seed: int = 0, checked: bool = True
) -> None:
    """Convert the linear layers of a model in place, as a recipe says.

    Args:
        device: Where the model will compute.
        seed: For recipes that draw random numbers: the same on every rank.
        checked: Whether to refuse a device that cannot compute in the format.

    Effects:
        Gives the layers the class of the library's, and the attributes that it needs. Parameters,
        buffers and hooks stay as they are.

    Raises:
        PlanError: as `recipe_targets`, or the device cannot compute in this format. The model
            is as it was, then and after any other error.
        MissingPackageError: the library is not installed.
    """
    how = _BY_RECORD[type(recipe)]
    if checked and (problem := how.check(recipe, device)) is not None:
        raise PlanError(f"Plan(precision=fx.Precision(compute='fp8', ...)): {problem}")
    names = (*recipe_targets(module, recipe).names, *how.others(module, recipe))
    parts = [module.get_submodule(name) for name in names]
    library_layers = [
        how.like(part, recipe, device, seed + index) for index, part in enumerate(parts)
    ]
    for part, like in zip(parts, library_layers, strict=True):
        added = {name: value for name, value in vars(like).items() if name not in vars(part)}
        part.__class__ = type(like)
        vars(part).update(added)
