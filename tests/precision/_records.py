"""Formats of quantized weights that run on a CPU, and models that they fit."""

import importlib.util

import pytest
import torch
from torch import nn

import fxtrain as fx

RECORDS = {
    "bnb8": fx.Bnb8(threshold=5.0),
    "nf4": fx.Bnb4(),
    "fp4": fx.Bnb4(quant_type="fp4", double_quant=False, compute=None),
    "int8": fx.Torchao(),
    "int8 dynamic": fx.Torchao(activations="int8"),
    "int4": fx.Torchao(weights="int4", group=32),
    "float8": fx.Torchao(weights="float8"),
}
TRAINABLE = [name for name in RECORDS if name not in ("int8 dynamic", "int4")]


def _absent(record):
    name = "torchao" if record.kind == "torchao" else "bitsandbytes"
    return importlib.util.find_spec(name) is None


def marked(names):
    """Names of records as parameters; skipped where their package is not installed."""
    skip = pytest.mark.skipif
    return [
        pytest.param(name, marks=skip(_absent(RECORDS[name]), reason="needs fxtrain[quant]"))
        for name in names
    ]


def mlp(width=64, *, dtype=torch.float32, device="cpu", seed=0):
    """Two layers to quantize and a head."""
    torch.manual_seed(seed)
    with torch.device(device):
        return nn.Sequential(
            nn.Linear(64, width, dtype=dtype),
            nn.GELU(),
            nn.Linear(width, 64, bias=False, dtype=dtype),
            nn.Linear(64, 3, dtype=dtype),
        )


def frozen_mlp(**options):
    """The same with a head that trains."""
    net = mlp(**options).requires_grad_(False)
    net[3].requires_grad_(True)
    return net
