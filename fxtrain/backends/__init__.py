"""Strategies: the code that runs each kind of plan."""

from fxtrain.backends.core.optimizers import Params
from fxtrain.backends.whole_weights import gathered, weights
from fxtrain.backends.wrapping import unwrap, wrap
from fxtrain.state.registry import built_in, strategies

__all__ = ["Params", "built_in", "gathered", "strategies", "unwrap", "weights", "wrap"]
