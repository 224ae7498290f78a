"""Strategies: the code that runs each kind of plan."""

from fxtrain.backends.core.optimizers import Params
from fxtrain.backends.deepspeed.config import deepspeed_config
from fxtrain.backends.deepspeed.setup import zero_init
from fxtrain.backends.table import STRATEGIES, strategies, unwrap, wrap
from fxtrain.backends.whole_weights import gathered, weights

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
