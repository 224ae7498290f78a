"""From the config of a tracker to its functions."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from operator import attrgetter
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
    JSON_LINES, TERMINAL, TENSORBOARD, WANDB, TRACKIO, COMET, AIM, MLFLOW, CLEARML, DVCLIVE, SWANLAB
)  # fmt: skip


def trackers() -> dict[type, Tracker]:
    """Every tracker by its config type: fxtrain's own, then those of installed packages.

    A package adds one with an entry point in the group `fxtrain.trackers` that loads a
    `fxtrain.trackers.Tracker`.

    Raises:
        PlanError: an entry point loads something else, or two trackers share a config type.

    Example:
        >>> from fxtrain.trackers import trackers
        >>> sorted(config.__name__ for config in trackers())[:4]
        ['Aim', 'ClearML', 'Comet', 'DVCLive']
    """
    own: dict[type, Tracker] = {row.config: row for row in TRACKERS if row.config is not None}
    group = "fxtrain.trackers"
    of_config = attrgetter("config")
    return own | installed_rows(
        taken=own, group=group, kind=Tracker, key=of_config, error=PlanError
    )


def targets(to: Any) -> Iterator[tuple[Tracker, Any]]:
    """Trackers with their configs, from what `fx.track` takes.

    Raises:
        PlanError: no tracker is registered for one; the message has the most similar name.
    """
    for target in (to,) if isinstance(to, str) or not isinstance(to, Iterable) else to:
        if target == "all":
            yield from ((row, row.config()) for row in TRACKERS if row.config and _is_there(row))
        elif isinstance(target, Tracker):
            yield target, None
        else:
            yield _found(target)


def _is_there(row: Tracker) -> bool:
    spec = find_spec(row.package) if row.package else None
    # A folder without modules, such as the one that wandb writes, has no origin.
    return not row.package or (spec is not None and spec.origin is not None)


def _found(target: Any) -> tuple[Tracker, Any]:
    own = {row.config: row for row in TRACKERS if row.config is not None}
    table = own if type(target) in own else trackers()  # packages are asked only if needed
    kinds = {str(kind_of(config)): config for config in table}
    config = kinds[target]() if isinstance(target, str) and target in kinds else target
    if type(config) in table:
        return table[type(config)], config
    word = target if isinstance(target, str) else getattr(target, "__name__", "")
    near = get_close_matches(word.lower(), kinds, n=1)
    raise PlanError(
        f"track: no tracker is registered for {shown(target)}. Choose configs such as "
        f'fx.TensorBoard(), kinds such as "tensorboard", "all", or a fxtrain.trackers.Tracker; the '
        f"kinds are {', '.join(sorted(kinds))}."
        + "".join(f" Did you mean fx.{kinds[kind].__name__}(...)?" for kind in near)
    )
