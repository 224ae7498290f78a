"""Inspects machines, tests setups, and reruns a script to examine it."""

from fxtrain.diagnosis.environment import (
    clock_problems,
    collect,
    fact_problems,
    facts_here,
    hidden,
    shown_setting,
)

__all__ = ["clock_problems", "collect", "fact_problems", "facts_here", "hidden", "shown_setting"]
