"""Inspects machines, tests setups, and reruns a script to examine it."""

from fxtrain.diagnosis.environment import collect, hidden, shown
from fxtrain.diagnosis.facts import clock_problems, fact_problems, facts_here

__all__ = [
    "clock_problems",
    "collect",
    "fact_problems",
    "facts_here",
    "hidden",
    "shown",
]
