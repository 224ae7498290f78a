"""The arguments of a save: looked at on each rank, compared where the ranks meet anyway."""

from collections.abc import Mapping
from typing import Any

import attrs

from fxtrain._errors import CheckpointError
from fxtrain.checkpoint.local_storage import Storage, open_storage
from fxtrain.checkpoint.retention import RetentionRule, retention_rule
from fxtrain.checkpoint.snapshot import by_name
from fxtrain.state import Position, Wrapped

__all__ = ["SaveRequest", "save_request"]


@attrs.frozen(kw_only=True, eq=False)
class SaveRequest:
    """What one rank asks to save, and where.

    Attributes:
        folder: Of the run's checkpoints.
        models: By name.
        position: Where the run stands.
        keep: Which checkpoints stay.
        must_match: The arguments that must be equal on every rank, in words.
    """

    folder: Storage
    models: Mapping[str, Wrapped]
    position: Position
    keep: RetentionRule
    must_match: Mapping[str, str]


def save_request(
    path: Any, model: Any, position: Any, metric: Any, rules: Mapping[str, Any], **how: Any
) -> SaveRequest:
    """The arguments of `save`.

    Args:
        rules: `keep_last`, `keep_every`, `keep_best` and `best`.
        how: `background` and `busy`.

    Raises:
        CheckpointError: one of them makes no sense.
    """
    last, every, best = rules["keep_last"], rules["keep_every"], rules["keep_best"]
    keep = retention_rule(last, every, best, rules["best"], metric)
    models = by_name(model)
    if not isinstance(position, Position):
        raise CheckpointError(
            f"save(position=...) takes a Position, found {type(position).__name__}. Use "
            f"batch.position or report.position."
        )
    if how["busy"] not in ("wait", "skip"):
        raise CheckpointError(f"save(busy={how['busy']!r}): choose 'wait' or 'skip'.")
    folder = open_storage(path)
    words = {name: repr(value) for name, value in {**how, **rules}.items()}
    return SaveRequest(
        folder=folder,
        models=models,
        position=position,
        keep=keep,
        must_match={"path": repr(str(folder)), **words},
    )
