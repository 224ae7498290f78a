"""Running means over a loop, of all ranks together."""

import math
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain import ops
from fxtrain._display import number
from fxtrain._record import shown
from fxtrain.errors import DataError
from fxtrain.ops.devices import as_scalar
from fxtrain.state import DistContext, Report, Weighted


@attrs.frozen(eq=False)
class Mean:
    """A running weighted mean over batches and ranks; a value, like everything that a loop carries.

    `update` waits for no device and for no rank.

    Attributes:
        total: The values so far, each times its weight, of this rank.
        weight: Their weights.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     mean = fx.Mean()
        ...     for loss, rows in ((torch.tensor(1.0), 3), (torch.tensor(5.0), 1)):
        ...         mean = mean.update(loss, rows)
        ...     mean.reduce(ctx)
        2.0
    """

    total: Tensor | float = attrs.field(default=0.0, repr=number)
    weight: Tensor | float = attrs.field(default=0.0, repr=number)

    def update(
        self, value: Tensor | float | Weighted | Report, weight: Tensor | float = 1
    ) -> "Mean":
        """The mean after one more value.

        Args:
            value: A number or a tensor of one element; `fx.Weighted`, with its weight; or the
                report of a step, which is its loss, by the weight of the loss.
            weight: How much the value counts: rows, or tokens.

        Raises:
            DataError: it is no number.
        """
        if type(value) is Report:
            value, weight = value.loss, value.weight
        if type(value) is Weighted:
            return Mean(self.total + total_of(value.total), self.weight + total_of(value.weight))
        if type(weight) is not int:
            weight = total_of(weight)
        return Mean(self.total + total_of(value) * weight, self.weight + weight)

    def reduce(self, ctx: DistContext) -> float:
        """The mean of all ranks together, which is the same on every rank; NaN without values.

        Ranks of a tensor or pipeline axis count once, as they have the same values.

        Effects:
            One all-reduce of two numbers; waits for the device.
        """
        total, weight = ops.reduce(self.pair(ctx), ctx.axis("loss"), op="sum").tolist()
        return total / weight if weight else math.nan

    def pair(self, ctx: DistContext) -> Tensor:
        """Total and weight of this rank, shape (2,), on the device: to reduce several at once."""
        wide = torch.float32 if ctx.device.type == "mps" else torch.float64
        both = (self.total, self.weight)
        if ctx.device.type == "cpu" and type(self.total) is type(self.weight) is float:
            return torch.tensor(both, dtype=wide, device="cpu")
        like = torch.empty((), dtype=wide, device=ctx.device)
        return torch.stack([as_scalar(one, like) for one in both])  # waits for no device


def total_of(value: Any) -> Tensor | float:
    """A number in host memory as Python's, or a tensor in the widest format of its device.

    Raises:
        DataError: it is neither a number nor a tensor of one element.
    """
    if type(value) is Tensor and value.is_cpu and value.numel() == 1 and not value.is_complex():
        return float(value.item())  # sums of Python numbers take a tenth of the time
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            wide = torch.float32 if value.device.type == "mps" else torch.float64
            return value.detach().reshape(()).to(wide)
    elif isinstance(value, int | float):
        return float(value)
    raise DataError(
        f"Mean.update takes a number, a tensor of one element, fx.Weighted or the report of a "
        f"step, found {shown(value)}. Take its mean first."
    )


def finite_number(value: Any) -> float | None:
    """A number or a tensor of one element as a finite float; None if it is something else.

    Example:
        >>> finite_number(torch.tensor(0.5)), finite_number(float("nan")), finite_number("0.5")
        (0.5, None, None)
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
