"""What the loaders of one dataset know of it together, without writing anything into it."""

from typing import Any

import attrs
from torch.utils.weak import WeakIdKeyDictionary


@attrs.define(eq=False)
class DatasetUse:
    """How the loaders of this process have used a dataset so far."""

    epoch: int | None = None  # the one that it was told last; None if it wants to know none
    openings: int = 0  # how often an iteration of it began, where it has a state
    is_known: bool = False  # whether its first state was taken
    start: Any = None  # that state


# By identity: a dataset may compare equal to another one, or have no hash.
_USES = WeakIdKeyDictionary()


def use_of(dataset: Any) -> DatasetUse:
    """The record of a dataset, shared by its loaders.

    A dataset that cannot be referenced weakly has a new record each time.
    """
    try:
        return _USES.setdefault(dataset, DatasetUse())
    except TypeError:
        return DatasetUse()


def call_set_epoch(dataset: Any, epoch: int) -> None:
    """Call a dataset's `set_epoch`, if it has one."""
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
        use_of(dataset).epoch = epoch
