"""Linear layers that compute as a recipe says: chosen, and converted in place.

A converted layer is the user's module with another class, so that its parameters, names, hooks and
the references to it stay as they are.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fxtrain._optional import optional
from fxtrain.errors import PlanError
from fxtrain.precision.library import linear_like
from fxtrain.precision.targets import choose_linears
from fxtrain.precision.torchao_layers import has_float8, import_torchao, quietly
from fxtrain.state import MX, TE, Float8, Key, Recipe
from fxtrain.state.keys import SCALES

_NEEDED_BY = "Plan(precision=fx.Precision(compute='fp8', recipe=...))"


def _modules() -> Any:
    import_torchao(_NEEDED_BY)
    return quietly("fxtrain.precision.torchao_modules")


# float8.


def _float8_config(recipe: Float8, *, gather: bool = False) -> Any:
    config = importlib.import_module("torchao.float8").Float8LinearConfig.from_recipe_name(
        recipe.scaling
    )
    changes = {"emulate": recipe.emulate, "pad_inner_dim": recipe.pad}
    return dataclasses.replace(config, **changes, enable_fsdp_float8_all_gather=gather)


def _like_float8(part: nn.Linear, recipe: Float8, device: torch.device, seed: int) -> nn.Module:
    modules = _modules()
    layer = modules.convert_to_float8_training(linear_like(part), config=_float8_config(recipe))
    if device.type != "cuda":  # torchao's own layer only knows autocast of CUDA
        layer.__class__ = modules.Float8Linear
    return layer


def gather_in_float8(module: nn.Module, recipe: Float8) -> None:
    """Have FSDP cast shards of converted layers to float8 before it gathers them.

    To be called before the model is split: the weights become tensors of torchao that cast
    themselves, over the same memory.
    """
    modules = _modules()
    config = _float8_config(recipe, gather=True)
    for layer in module.modules():
        if isinstance(layer, modules.float8_linear.Float8Linear):
            plain = linear_like(cast(nn.Linear, layer))
            plain.weight = layer.get_parameter("weight")
            layer.weight = modules.convert_to_float8_training(plain, config=config).weight


# Microscaling formats.


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


# Transformer Engine.

# What must divide sizes, the library's own check, and the GPUs that pass it.
_SCALINGS: Mapping[str, tuple[int, str, str]] = {
    "delayed": (16, "is_fp8_available", "CUDA 8.9 or newer (L4, H100, B200)"),
    "current": (16, "is_fp8_available", "CUDA 8.9 or newer (L4, H100, B200)"),
    "block": (16, "is_fp8_block_scaling_available", "CUDA 9.0 or newer (H100, B200)"),
    "mxfp8": (32, "is_mxfp8_available", "CUDA 10.0 or newer (B200, GB200)"),
    "nvfp4": (16, "is_nvfp4_available", "CUDA 10.0 or newer (B200, GB200)"),
}
_KEYS = ("scale", "amax_history")


def _engine() -> Any:
    optional("transformer_engine", extra="te", needed_by=_NEEDED_BY)
    return importlib.import_module("transformer_engine.pytorch")


@functools.lru_cache(maxsize=1)
def _classes(library: Any) -> Mapping[type, type]:
    """Its classes without their extra state: pickled bytes, which no checkpoint contains."""
    plain = {
        "get_extra_state": nn.Module.get_extra_state,
        "set_extra_state": nn.Module.set_extra_state,
    }
    return {
        nn.Linear: type("Linear", (library.Linear,), plain),
        nn.LayerNorm: type("LayerNorm", (library.LayerNorm,), plain),
    }


def _like_te(part: nn.Module, recipe: TE, device: torch.device, seed: int) -> nn.Module:
    kind = _classes(_engine())[type(part)]
    dtype = next(part.parameters()).dtype
    if isinstance(part, nn.LayerNorm):
        return kind(part.normalized_shape, eps=part.eps, device="meta", dtype=dtype)
    assert isinstance(part, nn.Linear)
    options = {"bias": part.bias is not None, "params_dtype": dtype, "device": "meta"}
    return kind(part.in_features, part.out_features, **options)


def _norms(module: nn.Module, recipe: TE) -> tuple[str, ...]:
    """Layer norms with a weight and a bias, which the library's always have."""
    if not recipe.norms:
        return ()
    named = [(name, part) for name, part in module.named_modules() if type(part) is nn.LayerNorm]
    return tuple(
        name
        for name, part in named
        if part is not module and len(list(part.parameters(recurse=False))) == 2
    )


def _recipe(recipe: TE) -> Any:
    home = importlib.import_module("transformer_engine.common.recipe")
    formats = {"hybrid": home.Format.HYBRID, "e4m3": home.Format.E4M3}
    if recipe.scaling == "delayed":
        return home.DelayedScaling(
            margin=recipe.margin,
            fp8_format=formats[recipe.format],
            amax_history_len=recipe.history,
            amax_compute_algo=recipe.amax,
        )
    if recipe.scaling == "current":
        return home.Float8CurrentScaling(fp8_format=formats[recipe.format])
    names = {"block": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling"}
    return getattr(home, names.get(recipe.scaling, "NVFP4BlockScaling"))()


def engine_region(
    module: nn.Module, recipe: TE, group: Any, run: Callable[..., Any]
) -> Callable[..., Any]:
    """A forward in the library's autocast region; `group` reduces the largest values, if any."""
    library, settings = _engine(), _recipe(recipe)

    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        enabled = module.training or recipe.evaluate
        with library.autocast(enabled=enabled, recipe=settings, amax_reduction_group=group):
            return run(*args, **kwargs)

    return forward


def scaling_state(module: nn.Module, recipe: TE, *, create: bool = False) -> dict[Key, Tensor]:
    """The live scales and histories of delayed scaling; `create` makes those of unused layers."""
    scales: dict[Key, Tensor] = {}
    if recipe.scaling != "delayed":
        return scales
    for name, part in module.named_modules():
        layer: Any = part
        if not isinstance(getattr(part, "fp8_meta", None), dict):
            continue
        if create and not layer.fp8_meta_tensors_initialized:
            # The forward of a linear layer sets both, and what follows needs them.
            layer.fp8_meta |= {"recipe": _recipe(recipe), "num_gemms": 1}
            layer.init_fp8_meta_tensors(layer.fp8_meta["recipe"])
        for way in ("scaling_fwd", "scaling_bwd"):
            if way in layer.fp8_meta:
                meta = layer.fp8_meta[way]
                scales |= {Key.of(SCALES, name, way, key): getattr(meta, key) for key in _KEYS}
    return scales


def _device_problem(recipe: Recipe, device: torch.device) -> str | None:
    """Why a device cannot compute in the format of a recipe, or None. Imports the library."""
    reason, advice = f"this device is {device.type}", "Use precision='bf16'"
    if isinstance(recipe, TE):
        scaling = _SCALINGS[recipe.scaling]
        fits, reason = getattr(_engine(), scaling[1])(return_reason=True)
        what, needs = f"TE(scaling={recipe.scaling!r})", scaling[2]
        reason = f"Transformer Engine says: {reason or 'not available'}"
    elif isinstance(recipe, Float8):
        _modules()
        fits = recipe.emulate or has_float8(device)
        what = f"Float8(scaling={recipe.scaling!r})"
        needs = "float8 matrix products: CUDA 8.9 or newer (L4, H100, B200), MI300 or an Intel GPU"
        advice += ", or Float8(emulate=True) to try the plan out here, slowly"
    else:
        _modules()
        nvidia = device.type == "cuda" and torch.version.hip is None
        fits = recipe.emulate
        fits = fits or (nvidia and torch.cuda.get_device_capability(device) >= (10, 0))
        what = f"MX(format={recipe.format!r})"
        needs = "products in microscaling formats: CUDA 10.0 or newer (B200, GB200)"
        if recipe.format != "nvfp4":
            advice += f", or MX(format={recipe.format!r}, emulate=True) to try the plan out, slowly"
    return None if fits else f"{what} needs a GPU with {needs}; {reason}. {advice}."


# A layer of the library's class, whose own attributes a converted layer takes; its parameters are
# not used.
_LIKE: Mapping[type, Callable[[Any, Any, torch.device, int], nn.Module]] = {
    Float8: _like_float8, MX: _like_mx, TE: _like_te
}  # fmt: skip


def recipe_targets(module: nn.Module, recipe: Recipe) -> tuple[tuple[str, ...], dict[str, str]]:
    """The linear layers that a recipe converts, and why it skips others, as `choose_linears`."""
    unit = 16
    if isinstance(recipe, MX):
        unit = 128 if recipe.format == "nvfp4" else 32
    elif isinstance(recipe, TE):
        unit = _SCALINGS[recipe.scaling][0]

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

    Gives the layers the class of the library's, and the attributes that it needs. Parameters,
    buffers and hooks stay as they are. `seed` is for recipes that draw random numbers, the same on
    every rank. With `checked`, a device that cannot compute in the format is refused. After an
    error, the model is as it was.
    """
    if checked and (problem := _device_problem(recipe, device)) is not None:
        raise PlanError(f"Plan(precision=fx.Precision(compute='fp8', ...)): {problem}")
    names = recipe_targets(module, recipe)[0]
    if isinstance(recipe, TE):
        names += _norms(module, recipe)
    parts = [module.get_submodule(name) for name in names]
    like_of = _LIKE[type(recipe)]
    library_layers = [like_of(part, recipe, device, seed + n) for n, part in enumerate(parts)]
    for part, like in zip(parts, library_layers, strict=True):
        added = {name: value for name, value in vars(like).items() if name not in vars(part)}
        part.__class__ = type(like)
        vars(part).update(added)
