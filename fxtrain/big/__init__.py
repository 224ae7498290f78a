"""Models that do not fit a device: their sizes, and what is placed where."""

from fxtrain.big.budgets import Budget, budget
from fxtrain.big.measuring import sizes
from fxtrain.big.meta_models import empty
from fxtrain.big.placing import place
from fxtrain.big.speeds import Estimate, Speeds, estimate, read_speed
from fxtrain.big.tables import table
from fxtrain.big.unit_sizes import Sizes, UnitSize

__all__ = [
    "Budget", "Estimate", "Sizes", "Speeds", "UnitSize", "budget", "empty", "estimate", "place",
    "read_speed", "sizes", "table",
]  # fmt: skip
