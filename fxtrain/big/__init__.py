"""Models that do not fit on a device: their sizes and their placement."""

from fxtrain.big.budgets import Budget, budget
from fxtrain.big.measuring import sizes
from fxtrain.big.meta_models import empty
from fxtrain.big.narrowing import Narrowed, narrow, widen
from fxtrain.big.placing import place
from fxtrain.big.speeds import Estimate, Speeds, estimate, read_speed
from fxtrain.big.tables import table
from fxtrain.big.taking_turns import Turns, bring, end_turns, release, turns
from fxtrain.big.unit_sizes import Sizes, UnitSize

__all__ = [
    "Budget", "Estimate", "Narrowed", "Sizes", "Speeds", "Turns", "UnitSize", "bring", "budget",
    "empty", "end_turns", "estimate", "narrow", "place", "read_speed", "release", "sizes", "table",
    "turns", "widen",
]  # fmt: skip
