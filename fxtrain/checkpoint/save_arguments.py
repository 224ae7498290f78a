"""The arguments of a save: looked at on each rank, compared where the ranks meet anyway."""

from collections.abc import Mapping
from typing import Any

import attrs

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint.local_storage import Place, place_of
from fxtrain.checkpoint.retention import Keep, keep_of
from fxtrain.checkpoint.snapshot import by_name
from fxtrain.state import Position, Wrapped

__all__ = ["Asked", "asked_of"]


@attrs.frozen(kw_only=True, eq=False)
class Asked:
    """What one rank asks to save, and where.

    Attributes:
        folder: Of the run's checkpoints.
        models: By name.
        position: Where the run stands.
        keep: Which checkpoints stay.
        alike: The arguments that must be equal on every rank, in words.
    """

    folder: Place
    models: Mapping[str, Wrapped]
    position: Position
    keep: Keep
    alike: Mapping[str, str]


def asked_of(
    path: Any, model: Any, position: Any, metric: Any, rules: Mapping[str, Any], **how: Any
) -> Asked:
    """The arguments of `save`.

    Args:
        rules: `keep_last`, `keep_every`, `keep_best` and `best`.
        how: `background` and `busy`.

    Raises:
        CheckpointError: one of them makes no sense.
    """
    last, every, best = rules["keep_last"], rules["keep_every"], rules["keep_best"]
    keep = keep_of(last, every, best, rules["best"], metric)
    models = by_name(model)
    if not isinstance(position, Position):
        raise CheckpointError(
            f"save(position=...) takes a Position, found {type(position).__name__}. Use "
            f"batch.position or report.position."
        )
    if how["busy"] not in ("wait", "skip"):
        raise CheckpointError(f"save(busy={how['busy']!r}): choose 'wait' or 'skip'.")
    folder = place_of(path)
    words = {name: repr(value) for name, value in {**how, **rules}.items()}
    return Asked(
        folder=folder,
        models=models,
        position=position,
        keep=keep,
        alike={"path": repr(str(folder)), **words},
    )
