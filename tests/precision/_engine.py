"""A stand-in for the part of Transformer Engine that fxtrain calls; it computes in fp32.

It was written after version 2.10: the names and the order of its calls, and none of its numbers.
"""

import enum
import pickle
import sys
import types

import torch
import torch.nn.functional as F
from torch import nn


class _Format(enum.Enum):
    HYBRID = "hybrid"
    E4M3 = "e4m3"


class _Recipe:
    def __init__(self, **fields):
        self.fields = fields


class _Scaling:
    def __init__(self, recipe):
        self.scale = torch.ones(2)
        self.amax_history = torch.zeros(recipe.fields["amax_history_len"], 2)


class _Region:
    """The library's `autocast`; `entered` is what it was called with."""

    entered = []  # noqa: RUF012
    recipe = None

    def __init__(
        self,
        *,
        enabled=True,
        calibrating=False,
        recipe=None,
        amax_reduction_group=None,
        _graph=False,
    ):
        assert not calibrating and not _graph
        self.given = (enabled, recipe, amax_reduction_group)

    def __enter__(self):
        if self.given[0] and type(self.given[1]).__name__ == "DelayedScaling":
            assert not torch.compiler.is_compiling()  # the library's own error, since 2.15
        _Region.entered.append(self.given)
        _Region.recipe = self.given[1] if self.given[0] else None

    def __exit__(self, *_):
        _Region.recipe = None


class _Linear(nn.Module):
    def __init__(self, in_features, out_features, *, bias, params_dtype, device):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        sizes = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(sizes, dtype=params_dtype, device=device))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, dtype=params_dtype, device=device))
        else:
            self.bias = torch.Tensor()
        self.fp8_meta = {"fp8_checkpoint": False}
        self.fp8_meta_tensors_initialized = False

    def init_fp8_meta_tensors(self, recipe):
        assert (
            self.fp8_meta["num_gemms"] == 1
        )  # the library's forward sets it; its sizes depend on it
        for way in ("scaling_fwd", "scaling_bwd"):
            self.fp8_meta[way] = _Scaling(recipe)
        self.fp8_meta_tensors_initialized = True

    def get_extra_state(self):
        return torch.frombuffer(bytearray(pickle.dumps({})), dtype=torch.uint8)

    def set_extra_state(self, state):
        raise AssertionError("nothing may be unpickled")

    @torch.compiler.disable
    def forward(self, x):
        if _Region.recipe is not None:
            self.fp8_meta |= {"recipe": _Region.recipe, "num_gemms": 1}
            if not self.fp8_meta_tensors_initialized:
                self.init_fp8_meta_tensors(_Region.recipe)
            kept = self.fp8_meta["scaling_fwd"]
            kept.amax_history.copy_(kept.amax_history.roll(-1, 0))
            kept.amax_history[0] = torch.stack([x.abs().max(), self.weight.abs().max()]).detach()
            kept.scale.copy_(1 + kept.amax_history.amax(0) / 100)  # later steps depend on it
            x = x * kept.scale[0]
        return F.linear(x, self.weight, self.bias if self.bias.numel() else None)


class _LayerNorm(nn.Module):
    def __init__(self, normalized_shape, *, eps, device, dtype):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, False
        self.weight = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(normalized_shape, device=device, dtype=dtype))

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def install(monkeypatch, *, available=(True, "")):
    """Put the stand-in where imports find it; returns the list of regions that were entered."""
    package, home = types.ModuleType("transformer_engine"), types.ModuleType("pytorch")
    recipes = types.ModuleType("recipe")
    recipes.Format = _Format
    for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"):
        setattr(recipes, name, type(name, (_Recipe,), {}))
    home.Linear, home.LayerNorm, home.autocast = _Linear, _LayerNorm, _Region
    for name in ("fp8", "fp8_block_scaling", "mxfp8", "nvfp4"):
        setattr(home, f"is_{name}_available", lambda return_reason: available)
    named = {"": package, ".pytorch": home, ".common": types.ModuleType("common")}
    for name, module in {**named, ".common.recipe": recipes}.items():
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", module)
    _Region.entered.clear()
    return _Region.entered
