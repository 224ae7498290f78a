"""What changes in a wrapped model: its status, its updates and its open accumulation window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

if TYPE_CHECKING:
    import torch

    from fxtrain.state.strategy import Round


@attrs.define(kw_only=True)
class ModelStatus:
    """The mutable part of the handle of a model, beside the sums of its window.

    Attributes:
        closed: The call because of which the handle cannot be used: `fx.unwrap` or `fx.release`
            for good, or `fx.gathered` until its block ends; empty while it can be used.
        in_backward: Whether gradients of this model are computed now, by a step or by
            `ops.backward`: a backward that reaches it at another time is that of another model.
        added_grads: Whether `ops.backward` added gradients, to which the next step adds its own.
        scheduled_update: The number of the last update that stepped the schedulers, or None.
        schedule_counts: What each scheduler had counted then. By these a step notices that the
            loop advanced them as well.
        replica: The replica that makes the next update independently of the others (`Plan.local`);
            None if all ranks make it together.
        without_rows: Whether that replica has no row in the window that closes.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     with fx.gathered(model):
        ...         model.status.closed
        'gathered'
    """

    closed: Literal["", "gathered", "unwrap", "release"] = ""
    in_backward: bool = False
    added_grads: bool = False
    scheduled_update: int | None = None
    schedule_counts: tuple[int, ...] = ()
    replica: Round | None = None
    without_rows: bool = False


@attrs.define(kw_only=True, eq=False)
class AccumulationWindow:
    """A model's updates, and sums over its open accumulation window; zero between windows.

    It is mutable: a step changes it in place.

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
