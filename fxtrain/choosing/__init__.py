"""Estimate how long a step takes, and choose a plan."""

from fxtrain.choosing.candidates import Question, Trial
from fxtrain.choosing.costs import StepCost, step_cost
from fxtrain.choosing.report import Choice, ChoiceRow
from fxtrain.choosing.searching import search
from fxtrain.choosing.trials import SHORT, Look, batch_size, run_function

__all__ = [
    "Choice",
    "ChoiceRow",
    "Look",
    "Question",
    "SHORT",
    "StepCost",
    "Trial",
    "batch_size",
    "run_function",
    "search",
    "step_cost",
]
__dir__ = __all__.copy  # for completion
