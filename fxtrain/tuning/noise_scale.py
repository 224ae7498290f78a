"""The gradient noise scale: from which batch size on more rows add little."""

import math
from typing import Any

import attrs
from torch import Tensor

from fxtrain._record import at_least, between, record, shown
from fxtrain.errors import PlanError


@record
class NoiseScale:
    """The simple noise scale of McCandlish et al. 2018, from gradients of two batch sizes.

    The squared norm of a gradient over B rows is on average ‖G‖² + tr(Σ) / B, with the gradient G
    of all data and the covariance Σ of gradients of single rows. Two batch sizes give both terms;
    `value` is tr(Σ) / ‖G‖². Far below that batch size, twice the rows halve the updates needed; far
    above it, they add little. A plain value, so a checkpoint can store it.

    Attributes:
        decay: Weight of earlier updates in the moving averages of both terms; 0 uses the last
            update only.
        noise: Moving average of tr(Σ), without correction for its beginning.
        signal: Moving average of ‖G‖², without correction for its beginning.
        updates: Updates so far.

    Source:
        An Empirical Model of Large-Batch Training, appendix A.1, arXiv:1812.06162.

    Example:
        >>> import fxtrain as fx
        >>> scale = fx.tuning.NoiseScale().update(small=(3.0, 2), large=(2.0, 8))
        >>> round(scale.value, 3)
        5.714
    """

    decay: float = attrs.field(default=0.95, validator=between(0, 1, open_low=False))
    noise: float = 0.0
    signal: float = 0.0
    updates: int = attrs.field(default=0, validator=at_least(0))

    def update(
        self, small: tuple[Tensor | float, float], large: tuple[Tensor | float, float]
    ) -> "NoiseScale":
        """Return the record after one more update.

        Args:
            small: Norm of a gradient over few rows, and their number: of one micro-batch, on one
                rank. For several, pass the root of the mean of their squared norms.
            large: Norm of the gradient over the rows of the update, unclipped (`report.grad_norm`),
                and their number.

        Returns:
            A new record; unchanged if a norm is not finite.

        Effects:
            Reads norms that are tensors, which waits for the device.

        Raises:
            PlanError: a norm is no number, or `large` does not have more rows than `small`.
        """
        (few, b), (many, rows) = _pair("small", small), _pair("large", large)
        if not b < rows:
            raise PlanError(
                f"NoiseScale.update: small has {b:g} rows, and large {rows:g}. Use a gradient of "
                f"fewer rows, such as one micro-batch of several or one rank's."
            )
        few, many = few * few, many * many  # infinite if too large, where ** raises
        noise = (few - many) / (1 / b - 1 / rows)
        signal = (rows * many - b * few) / (rows - b)
        if not (math.isfinite(noise) and math.isfinite(signal)):
            return self
        return attrs.evolve(
            self,
            noise=self.decay * self.noise + (1 - self.decay) * noise,
            signal=self.decay * self.signal + (1 - self.decay) * signal,
            updates=self.updates + 1,
        )

    @property
    def value(self) -> float | None:
        """The noise scale in rows; None while there is no positive estimate of ‖G‖²."""
        return max(self.noise, 0.0) / self.signal if self.signal > 0 else None


def _pair(name: str, given: Any) -> tuple[float, float]:
    try:
        norm, rows = given
        values = [one.item() if isinstance(one, Tensor) else one for one in (norm, rows)]
        if all(isinstance(one, int | float) for one in values) and values[1] > 0:
            return float(values[0]), float(values[1])
    except (TypeError, ValueError, RuntimeError):
        pass
    raise PlanError(
        f"NoiseScale.update({name}={shown(given)}): pass the norm of a gradient and the number of "
        f"its rows. report.grad_norm is a number where Plan(clip_norm=...) is set."
    )
