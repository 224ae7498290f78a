"""What a model counts: its updates, and the micro-batches of its open accumulation window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch


@attrs.define(kw_only=True, eq=False)
class AccumulationWindow:
    """A model's updates, and sums over its open accumulation window; zero between windows.

    It is mutable: a step changes it in place. Equality and hash are by identity.

    Attributes:
        sums: On the device, floating-point, shape (4,): the four numbers that follow.
        scale: Factor of the window's `Weighted` losses before backward.
        weight: Sum of the weights of this rank's `Weighted` losses.
        bad_losses: Micro-batches with a non-finite loss.
        bad_grads: Gradients that were non-finite when an engine received them.
        micro: Micro-batches.
        rows: Their rows, including padding.
        full_rows: Rows of a full window.
        real_rows: Rows without padding.
        unscaled: Whether gradients are already unscaled (fp16).
        updates: Updates of the model, from the beginning of its training.
        closes: Whether the micro-batch that runs now ends the window.
        epoch: The epoch in which the window opened; None once a warning has told of it.

    Example:
        >>> import torch
        >>> from fxtrain.state import AccumulationWindow
        >>> window = AccumulationWindow(sums=torch.zeros(4))
        >>> window.weight.add_(8)
        tensor(8.)
        >>> window.sums
        tensor([0., 8., 0., 0.])
    """

    sums: torch.Tensor
    scale: torch.Tensor = attrs.field(init=False, repr=False)
    weight: torch.Tensor = attrs.field(init=False, repr=False)
    bad_losses: torch.Tensor = attrs.field(init=False, repr=False)
    bad_grads: torch.Tensor = attrs.field(init=False, repr=False)
    micro: int = 0
    rows: int = 0
    full_rows: int = 0
    real_rows: int = 0
    unscaled: bool = False
    updates: int = 0
    closes: bool = False
    epoch: int | None = 0

    def __attrs_post_init__(self) -> None:
        self.scale, self.weight = self.sums[0], self.sums[1]
        self.bad_losses, self.bad_grads = self.sums[2], self.sums[3]

    def end(self) -> None:
        """Count an update, and begin a new window."""
        self.updates += 1
        self.micro = self.rows = self.full_rows = self.real_rows = 0
        self.closes = False
