"""Strategies: the code that runs each kind of plan."""

from fxtrain.backends.core.optimizers import Params
from fxtrain.backends.whole_weights import gathered, weights
from fxtrain.backends.wrapping import built_in, strategies, unwrap, wrap

__all__ = ["Params", "built_in", "gathered", "strategies", "unwrap", "weights", "wrap"]
