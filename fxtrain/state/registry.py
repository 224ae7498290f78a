"""The available strategies: fxtrain's configs, and the entries of installed packages."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import attrs

from fxtrain._optional import installed_entries
from fxtrain.errors import PlanError
from fxtrain.state.deepspeed import DeepSpeed
from fxtrain.state.placement import Offload
from fxtrain.state.strategy_configs import DDP, FSDP, PP, XLA, Single

if TYPE_CHECKING:
    from fxtrain.state.strategy import Strategy

# fxtrain's configs, each with the place of its strategy in `fxtrain.backends`, a higher layer.
BUILT_IN: Mapping[type, str] = MappingProxyType(
    {
        Single: "single.SINGLE",
        DDP: "ddp.DDP_STRATEGY",
        FSDP: "fsdp.strategy.FSDP_STRATEGY",
        DeepSpeed: "deepspeed.strategy.DEEPSPEED_STRATEGY",
        PP: "pipeline.strategy.PIPELINE_STRATEGY",
        XLA: "xla.strategy.XLA_STRATEGY",
        Offload: "offload.strategy.OFFLOAD",
    }
)
GROUP = "fxtrain.strategies"


class Config(Protocol):
    """A frozen attrs record with a string `kind`, by which files name its type."""

    @property
    def kind(self) -> str: ...


def kind_of(config: type) -> str | None:
    """The kind by which files name a strategy config; None if it is not a config."""
    field = attrs.fields_dict(config).get("kind") if attrs.has(config) else None
    return field.default if field is not None and isinstance(field.default, str) else None


def installed_strategies() -> "tuple[Strategy, ...]":
    """The strategies of installed packages, from the entry points in the group `GROUP`.

    Everything that reads, checks or carries out a plan finds them here. An entry point that does
    not load, or loads a second strategy for a config, is a PlanError.
    """
    from fxtrain.state.strategy import Strategy  # imports the records that plans contain

    table = installed_entries(
        taken=BUILT_IN, group=GROUP, kind=Strategy, key=lambda entry: entry.config, error=PlanError
    )
    return tuple(table.values())


def installed_configs() -> tuple[type, ...]:
    """The configs of the strategies of installed packages."""
    return tuple(entry.config for entry in installed_strategies())


def built_in(config: type) -> "Strategy":
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


def strategies() -> "dict[type, Strategy]":
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


def registered(config: type) -> "Strategy | None":
    """The strategy of a config; None if there is none."""
    if config in BUILT_IN:
        return built_in(config)
    return {strategy.config: strategy for strategy in installed_strategies()}.get(config)


def strategy_of(config: Config) -> "Strategy":
    """The strategy that carries out the plans that have this config.

    Raises:
        PlanError: none is registered for it.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.state.registry import strategy_of
        >>> strategy_of(fx.DDP()).name
        'DDP'
    """
    strategy = registered(type(config))
    if strategy is None:
        kinds = (*BUILT_IN, *installed_configs())
        raise PlanError(
            f"Plan(strategy={config!r}): no strategy is registered for {type(config).__name__}. "
            f"Choose one of {', '.join(sorted(kind.__name__ for kind in kinds))}, or install the "
            f"package that provides it."
        )
    return strategy
