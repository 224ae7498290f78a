"""Estimate how long a step takes, and choose a plan."""

from fxtrain.choosing.costs import StepCost, step_cost

__all__ = ["StepCost", "step_cost"]
__dir__ = __all__.copy  # for completion
