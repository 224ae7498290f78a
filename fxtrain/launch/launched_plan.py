"""The plan of a launch file, from the launcher to the ranks: one variable."""

import importlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxtrain.state import Plan

__all__ = ["given_plan", "plan_variable"]


def given_plan(default: "Plan | None" = None, *, env: Mapping[str, str] | None = None) -> "Plan":
    """The plan that `fxtrain launch` took from a launch file, its profile and the environment.

    `fx.wrap` and `fx.shard` use it where they get no plan. Call this to read it, to change a
    field of it (`attrs.evolve`), or to set another default.

    Args:
        default: The plan where no launcher gave one; `fx.Plan()` by default. What the
            launch file leaves out has the defaults of `fx.Plan`, not those of this plan.
        env: Variables to read instead of the process's environment.

    Raises:
        PlanError: the variable FXTRAIN_PLAN contains no plan.

    Example:
        >>> import fxtrain as fx
        >>> fx.given_plan(fx.Plan(accumulate=2), env={}).accumulate
        2
    """
    state = importlib.import_module("fxtrain.state")
    return state.plan_in(os.environ if env is None else env) or default or state.Plan()


def plan_variable(plan: "Plan") -> str:
    """NAME=VALUE of the variable in which ranks find a plan.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.launch import plan_variable
        >>> name, _, value = plan_variable(fx.Plan(seed=3)).partition("=")
        >>> fx.given_plan(env={name: value}).seed
        3
    """
    state = importlib.import_module("fxtrain.state")
    data = json.loads(state.dumps(plan))
    return f"{state.PLAN_VARIABLE}={json.dumps(data, separators=(',', ':'))}"
