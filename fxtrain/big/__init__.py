"""Models that do not fit on a device: their sizes and their placement."""

from fxtrain.big.budgets import budget
from fxtrain.big.estimating import Estimate, estimate, read_speed, table
from fxtrain.big.measuring import Sizes, sizes
from fxtrain.big.meta_models import empty
from fxtrain.big.narrowing import narrow
from fxtrain.big.placing import place
from fxtrain.big.swapping import Turns, bring, end_turns, release, turns

__all__ = [
    "Estimate", "Sizes", "Turns", "bring", "budget", "empty",
    "end_turns", "estimate", "narrow", "place", "read_speed", "release", "sizes", "table", "turns",
]  # fmt: skip
__dir__ = __all__.copy  # for completion
