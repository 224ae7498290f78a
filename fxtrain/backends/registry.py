"""The strategy that carries out each config of a plan; it is imported on first use."""

import importlib

from fxtrain.errors import PlanError
from fxtrain.state import Plan, Strategy
from fxtrain.state.registry import BUILT_IN, installed_strategies


def built_in(config: type) -> Strategy:
    """fxtrain's own strategy of a config.

    Raises:
        KeyError: it has none.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.backends import built_in
        >>> built_in(fx.DDP).name
        'DDP'
    """
    module, _, name = BUILT_IN[config].rpartition(".")
    return getattr(importlib.import_module(f"fxtrain.backends.{module}"), name)


def strategies() -> dict[type, Strategy]:
    """Every strategy by its config type: fxtrain's own, then those of installed packages.

    A package adds one with an entry point in the group `fxtrain.strategies` that loads a
    `Strategy`. `fx.wrap(..., strategy=entry)` takes one without an entry point. A module that an
    entry point names takes fxtrain's own from `built_in`, since this function imports it.

    Effects:
        Imports all of them.

    Raises:
        PlanError: an entry point does not load, loads something else, or loads a second strategy
            for the same config.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.backends import strategies
        >>> strategies()[fx.DDP].name
        'DDP'
    """
    own = {config: built_in(config) for config in BUILT_IN}
    return own | {strategy.config: strategy for strategy in installed_strategies()}


def strategy_of(plan: Plan) -> Strategy:
    """The strategy that carries out a plan."""
    config = type(plan.strategy)
    if config in BUILT_IN:
        return built_in(config)
    installed = {strategy.config: strategy for strategy in installed_strategies()}
    if config not in installed:
        known = ", ".join(sorted(each.__name__ for each in (*BUILT_IN, *installed)))
        raise PlanError(
            f"Plan(strategy={plan.strategy!r}): no strategy is registered for {config.__name__}. "
            f"Choose one of {known}, or install the package that provides it."
        )
    return installed[config]
