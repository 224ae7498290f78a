"""Strategies: how each kind of plan is carried out."""

from fxtrain.backends._optim import Params
from fxtrain.backends._table import STRATEGIES, strategies, unwrap, wrap

__all__ = ["Params", "STRATEGIES", "strategies", "unwrap", "wrap"]
