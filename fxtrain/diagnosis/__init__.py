"""What is on a machine, whether a setup works, and a script run again to look at it."""

from fxtrain.diagnosis.environment import collect
from fxtrain.diagnosis.facts import clock_problems, fact_problems, facts_here
from fxtrain.diagnosis.secrets import hidden, hidden_words, shown

__all__ = [
    "clock_problems",
    "collect",
    "fact_problems",
    "facts_here",
    "hidden",
    "hidden_words",
    "shown",
]
