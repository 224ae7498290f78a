"""Estimate how long a step takes; `fxtrain.tuning.choose` compares plans by it."""

from fxtrain.choosing.costs import StepCost, step_cost

__all__ = ["StepCost", "step_cost"]
__dir__ = __all__.copy  # for completion
