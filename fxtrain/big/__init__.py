"""Models that do not fit a device: their sizes, and what is placed where."""

from fxtrain.big.budgets import Budget, budget
from fxtrain.big.measuring import sizes
from fxtrain.big.placing import place
from fxtrain.big.speeds import Estimate, Speeds, estimate
from fxtrain.big.unit_sizes import Sizes, UnitSize

__all__ = [
    "Budget", "Estimate", "Sizes", "Speeds", "UnitSize", "budget", "estimate", "place", "sizes",
]  # fmt: skip
