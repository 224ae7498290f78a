"""What the loaders of one dataset know of it together, without writing anything into it."""

from typing import Any

import attrs
from torch.utils.weak import WeakIdKeyDictionary


@attrs.define(eq=False)
class DatasetUse:
    """How the loaders of a context have used a dataset so far."""

    epoch: int | None = None  # the last that `set_epoch` was called with; None without `set_epoch`
    openings: int = 0  # how often an iteration of it began, where it has a state
    is_known: bool = False  # whether its first state was taken
    start: Any = None  # that state

    def set_epoch(self, dataset: Any, epoch: int) -> None:
        """Call the dataset's `set_epoch`, if it has one."""
        if callable(getattr(dataset, "set_epoch", None)):
            dataset.set_epoch(epoch)
            self.epoch = epoch


class DatasetUses(WeakIdKeyDictionary):
    """The datasets that the loaders of a context read.

    By identity: a dataset may compare equal to another one, or have no hash.
    """

    def of(self, dataset: Any) -> DatasetUse:
        """The record of a dataset; a new one each time if it cannot be referenced weakly."""
        new = DatasetUse()
        try:
            return self.setdefault(dataset, new) or new
        except TypeError:
            return new
