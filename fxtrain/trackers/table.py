"""From the config of a tracker to its functions."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from fxtrain._optional import installed_rows
from fxtrain._record import shown
from fxtrain.errors import PlanError
from fxtrain.state.registry import kind_of
from fxtrain.trackers.json_lines import JSON_LINES
from fxtrain.trackers.libraries.aim import AIM
from fxtrain.trackers.libraries.clearml import CLEARML
from fxtrain.trackers.libraries.comet import COMET
from fxtrain.trackers.libraries.dvclive import DVCLIVE
from fxtrain.trackers.libraries.mlflow import MLFLOW
from fxtrain.trackers.libraries.swanlab import SWANLAB
from fxtrain.trackers.libraries.tensorboard import TENSORBOARD
from fxtrain.trackers.libraries.trackio import TRACKIO
from fxtrain.trackers.libraries.wandb import WANDB
from fxtrain.trackers.terminal import TERMINAL
from fxtrain.trackers.tracker import Tracker

TRACKERS = (
    JSON_LINES,
    TERMINAL,
    TENSORBOARD,
    WANDB,
    TRACKIO,
    COMET,
    AIM,
    MLFLOW,
    CLEARML,
    DVCLIVE,
    SWANLAB,
)


def trackers() -> dict[type, Tracker]:
    """Every tracker by its config type: fxtrain's own, then those of installed packages.

    A package adds one with an entry point in the group `fxtrain.trackers` that loads a
    `fxtrain.trackers.Tracker`.

    Raises:
        PlanError: an entry point loads something else or a tracker without a config type, or two
            trackers share one.

    Example:
        >>> from fxtrain.trackers import trackers
        >>> sorted(config.__name__ for config in trackers())[:4]
        ['Aim', 'ClearML', 'Comet', 'DVCLive']
    """
    own: dict[type, Tracker] = {row.config: row for row in TRACKERS if row.config is not None}
    installed = installed_rows(
        taken=own, group="fxtrain.trackers", kind=Tracker, key=_config_of, error=PlanError
    )
    return {**own, **installed}


def _config_of(row: Tracker) -> type:
    if row.config is None:
        raise PlanError(
            f"The tracker {row.name!r} of an installed package has no config type by which to "
            f"find it. Report this to the package's author."
        )
    return row.config


def targets(to: Any) -> Iterator[Any]:
    """Configs and trackers in place of kinds, and of "all"."""
    several = isinstance(to, Iterable) and not isinstance(to, str | Mapping)
    for target in to if several else (to,):
        if target == "all":
            yield from (row.config() for row in TRACKERS if row.config and _is_installed(row))
        elif isinstance(target, str):
            kinds = {kind_of(config): config for config in trackers()}
            yield kinds[target]() if target in kinds else target
        else:
            yield target


def _is_installed(row: Tracker) -> bool:
    spec = find_spec(row.package) if row.package else None
    # A folder without modules, such as the one that wandb writes, has no origin.
    return not row.package or (spec is not None and spec.origin is not None)


def find(config: Any) -> Tracker:
    """The tracker that a config selects.

    Raises:
        PlanError: there is none; the message has the most similar name.
    """
    table = {row.config: row for row in TRACKERS}
    row = table.get(type(config)) or trackers().get(type(config))
    if row is not None:
        return row
    names = {kind.__name__.lower(): kind.__name__ for kind in trackers()}
    word = config if isinstance(config, str) else getattr(config, "__name__", type(config).__name__)
    near = get_close_matches(word.lower(), names, n=1)
    raise PlanError(
        f"track: no tracker is registered for {shown(config)}. Choose configs of "
        f"{', '.join(sorted(names.values()))}, such as fx.TensorBoard(), their kinds, such as "
        f'"tensorboard", "all", or pass a fxtrain.trackers.Tracker.'
        + "".join(f" Did you mean fx.{names[name]}(...)?" for name in near)
    )
