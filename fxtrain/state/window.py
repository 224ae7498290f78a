"""The record of an open accumulation window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch

__all__ = ["AccumulationWindow", "window_in"]


@attrs.frozen(kw_only=True, eq=False)
class AccumulationWindow:
    """Sums over the micro-batches of the open accumulation window; zero between windows.

    The record is frozen and its tensors change in place. Every field below `sums` and `counts` is
    one number in one of the two, so that a checkpoint holds two tensors and one call zeroes many
    numbers. Equality and hash are by identity.

    Attributes:
        sums: On the device, floating-point, shape (4,): the numbers from `scale` to `bad_grads`.
        counts: On the CPU, int64, shape (5,): the numbers from `micro` to `unscaled`.
        scale: Factor of the window's `Weighted` losses before backward.
        weight: Sum of the weights of this rank's `Weighted` losses.
        bad_losses: Micro-batches with a non-finite loss.
        bad_grads: Gradients that were non-finite when an engine received them.
        micro: Micro-batches.
        rows: Their rows, including padding.
        full_rows: Rows of a full window.
        real_rows: Rows without padding.
        unscaled: Whether gradients are already unscaled (fp16).
    """

    sums: torch.Tensor
    counts: torch.Tensor
    scale: torch.Tensor = attrs.field(repr=False)
    weight: torch.Tensor = attrs.field(repr=False)
    bad_losses: torch.Tensor = attrs.field(repr=False)
    bad_grads: torch.Tensor = attrs.field(repr=False)
    micro: torch.Tensor = attrs.field(repr=False)
    rows: torch.Tensor = attrs.field(repr=False)
    full_rows: torch.Tensor = attrs.field(repr=False)
    real_rows: torch.Tensor = attrs.field(repr=False)
    unscaled: torch.Tensor = attrs.field(repr=False)


def window_in(sums: torch.Tensor, counts: torch.Tensor) -> AccumulationWindow:
    """The window whose numbers are in two tensors.

    Args:
        sums: Floating-point, shape (4,).
        counts: On the CPU, int64, shape (5,).

    Example:
        >>> import torch
        >>> from fxtrain.state import window_in
        >>> window = window_in(torch.zeros(4), torch.zeros(5, dtype=torch.int64))
        >>> window.rows.add_(8)
        tensor(8)
        >>> window.counts
        tensor([0, 8, 0, 0, 0])
    """
    return AccumulationWindow(
        sums=sums,
        counts=counts,
        scale=sums[0],
        weight=sums[1],
        bad_losses=sums[2],
        bad_grads=sums[3],
        micro=counts[0],
        rows=counts[1],
        full_rows=counts[2],
        real_rows=counts[3],
        unscaled=counts[4],
    )
