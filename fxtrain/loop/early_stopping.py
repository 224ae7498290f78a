"""When to stop training: a record that the loop updates with each metric."""

import math
from typing import Literal, SupportsFloat

import attrs

from fxtrain._record import at_least, record


@record
class EarlyStopping:
    """Whether a metric has stopped improving. A plain value, so a checkpoint can store it.

    Give it a metric that is equal on every rank, such as a reduced loss, so that all ranks stop
    together.

    Attributes:
        patience: Consecutive values without an improvement after which to stop.
        min_delta: Minimum difference from the best value that counts as an improvement.
        best: Whether lower ("min") or higher ("max") is better.
        value: The best metric so far; None before the first.
        waited: Values seen since the best one.

    Example:
        >>> import fxtrain as fx
        >>> stopping = fx.EarlyStopping(patience=2)
        >>> for loss in (0.5, 0.4, 0.45, 0.41):
        ...     stopping = stopping.update(loss)
        >>> stopping.due, stopping.improved, stopping.value
        (True, False, 0.4)
    """

    patience: int = attrs.field(default=3, validator=at_least(1))
    min_delta: float = attrs.field(default=0.0, validator=at_least(0))
    best: Literal["min", "max"] = "min"
    value: float | None = None
    waited: int = attrs.field(default=0, validator=at_least(0))

    def update(self, metric: SupportsFloat) -> "EarlyStopping":
        """Return the record after one more metric.

        Args:
            metric: A number or a one-element tensor, which is read. A non-finite value is not an
                improvement.
        """
        number = float(metric)
        if self._is_better(number):
            return attrs.evolve(self, value=number, waited=0)
        return attrs.evolve(self, waited=self.waited + 1)

    @property
    def due(self) -> bool:
        """Whether to stop now."""
        return self.waited >= self.patience

    @property
    def improved(self) -> bool:
        """Whether the last metric is the best so far, and worth a checkpoint."""
        return self.value is not None and self.waited == 0

    def _is_better(self, number: float) -> bool:
        if not math.isfinite(number):
            return False
        if self.value is None:
            return True
        gain = self.value - number if self.best == "min" else number - self.value
        return gain > self.min_delta
