"""Strategies: how each kind of plan is carried out."""

from fxtrain.backends._deepspeed_config import deepspeed_config
from fxtrain.backends._deepspeed_wrap import zero_init
from fxtrain.backends._optim import Params
from fxtrain.backends._table import STRATEGIES, strategies, unwrap, wrap

__all__ = [
    "Params",
    "STRATEGIES",
    "deepspeed_config",
    "strategies",
    "unwrap",
    "wrap",
    "zero_init",
]
