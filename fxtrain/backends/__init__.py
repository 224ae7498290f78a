"""Strategies: how each kind of plan is carried out."""

from fxtrain.backends._deepspeed_config import deepspeed_config
from fxtrain.backends._deepspeed_wrap import zero_init
from fxtrain.backends._optim import Params
from fxtrain.backends._table import STRATEGIES, strategies, unwrap, wrap
from fxtrain.backends._whole import gathered, weights

__all__ = [
    "Params",
    "STRATEGIES",
    "deepspeed_config",
    "gathered",
    "strategies",
    "unwrap",
    "weights",
    "wrap",
    "zero_init",
]
