"""The available strategies: fxtrain's configs, and the entries of installed packages."""

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
