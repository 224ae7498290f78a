"""The arguments of `save`: validated on each rank, and compared in its first collective."""

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
    """The validated arguments of `save` on one rank.

    Attributes:
        folder: Folder of the run's checkpoints.
        models: Models by name.
        position: Position of the run.
        keep: Which checkpoints to keep.
        must_match: Arguments that must be equal on every rank, as text.
    """

    folder: Storage
    models: Mapping[str, Wrapped]
    position: Position
    keep: RetentionRule
    must_match: Mapping[str, str]


def save_request(
    path: Any, model: Any, position: Any, metric: Any, rules: Mapping[str, Any], **how: Any
) -> SaveRequest:
    """Validate the arguments of `save`.

    Args:
        rules: `keep_last`, `keep_every`, `keep_best` and `best`.
        how: `background` and `busy`.

    Raises:
        CheckpointError: an argument is invalid.
    """
    last, every, best = rules["keep_last"], rules["keep_every"], rules["keep_best"]
    keep = retention_rule(last, every, best, rules["best"], metric)
    models = by_name(model)
    if position is None:
        position = Position()
        for name, one in models.items():
            if one.window.updates or one.window.micro:
                raise CheckpointError(
                    f"save(position=...) is missing, but model {name!r} has made "
                    f"{one.window.updates} updates: the checkpoint would continue with the first "
                    f"row of the data. Pass position=report.position, or batch.position."
                )
    if not isinstance(position, Position):
        raise CheckpointError(
            f"save(position=...) takes a Position, found {type(position).__name__}. Pass "
            f"batch.position or report.position."
        )
    if how["busy"] not in ("wait", "skip"):
        raise CheckpointError(f"save(busy={how['busy']!r}): choose 'wait' or 'skip'.")
    folder = open_storage(path)
    texts = {name: repr(value) for name, value in {**how, **rules}.items()}
    return SaveRequest(
        folder=folder,
        models=models,
        position=position,
        keep=keep,
        must_match={"path": repr(str(folder)), **texts},
    )
