"""Layers of Transformer Engine, the region in which they compute, and their scales by name."""

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxtrain._optional import optional
from fxtrain.precision.library import LayerFormat
from fxtrain.state import TE

_NEEDED_BY = "Plan(precision=fx.Precision(compute='fp8', recipe=fx.TE(...)))"
# What must divide sizes, the library's own check, and the GPUs that pass it.
_SCALINGS: Mapping[str, tuple[int, str, str]] = {
    "delayed": (16, "is_fp8_available", "CUDA 8.9 or newer (L4, H100, B200)"),
    "current": (16, "is_fp8_available", "CUDA 8.9 or newer (L4, H100, B200)"),
    "block": (16, "is_fp8_block_scaling_available", "CUDA 9.0 or newer (H100, B200)"),
    "mxfp8": (32, "is_mxfp8_available", "CUDA 10.0 or newer (B200, GB200)"),
    "nvfp4": (16, "is_nvfp4_available", "CUDA 10.0 or newer (B200, GB200)"),
}
_KEYS = ("scale", "amax_history")


def _library() -> Any:
    optional("transformer_engine", extra="te", needed_by=_NEEDED_BY)
    return importlib.import_module("transformer_engine.pytorch")


def _check(recipe: TE, device: torch.device) -> str | None:
    library = _library()
    _, available, gpus = _SCALINGS[recipe.scaling]
    fits, reason = getattr(library, available)(return_reason=True)
    if fits:
        return None
    return (
        f"TE(scaling={recipe.scaling!r}) needs a GPU with {gpus}; Transformer Engine says: "
        f"{reason or 'not available'}. Use precision='bf16'."
    )


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


def _like(part: nn.Module, recipe: TE, device: torch.device, seed: int) -> nn.Module:
    kind = _classes(_library())[type(part)]
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
    """A forward that computes in the library's autocast region.

    Args:
        group: The ranks over which the largest values are reduced; None at one rank.
        run: The module's forward.
    """
    library, settings = _library(), _recipe(recipe)

    @functools.wraps(run)
    def forward(*args: Any, **kwargs: Any) -> Any:
        enabled = module.training or recipe.evaluate
        with library.autocast(enabled=enabled, recipe=settings, amax_reduction_group=group):
            return run(*args, **kwargs)

    return forward


def scaling_state(module: nn.Module, recipe: TE, *, create: bool = False) -> dict[str, Tensor]:
    """The live scales and histories of delayed scaling, by layer.

    Args:
        create: Give layers that have never run their tensors, to fill them.
    """
    scales: dict[str, Tensor] = {}
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
                scales |= {f"{name}.{way}.{key}": getattr(meta, key) for key in _KEYS}
    return scales


TE_LAYERS = LayerFormat(
    check=_check,
    multiple=lambda recipe: _SCALINGS[recipe.scaling][0],
    like=_like,
    others=_norms,
)
