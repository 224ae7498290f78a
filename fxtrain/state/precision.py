"""The dtypes of a plan."""

from typing import Literal

import attrs

from fxtrain._record import above, at_least, between, record

__all__ = ["FORMATS", "Compute", "LossScale", "Precision", "precision_of"]

FORMATS = ("fp32", "bf16", "fp16")


Compute = Literal["fp32", "bf16", "fp16"]


@record
class LossScale:
    """Dynamic loss scale for fp16; the defaults are torch's.

    Attributes:
        initial: Initial scale.
        growth: Factor after `interval` updates without overflow.
        backoff: Factor after an overflow; below 1.
        interval: Updates without overflow before the scale grows.
    """

    initial: float = attrs.field(default=65536.0, validator=above(0))
    growth: float = attrs.field(default=2.0, validator=above(1))
    backoff: float = attrs.field(default=0.5, validator=between(0, 1))
    interval: int = attrs.field(default=2000, validator=at_least(1))


@record
class Precision:
    """The dtypes in which a model computes. A plan also takes the bare name: `"bf16"`.

    Attributes:
        compute: Dtype of autocast regions; fp32 means no autocast.
        output: Dtype of the model's floating-point outputs; None leaves them unchanged.
        scale: Loss scale, used with fp16 only.
    """

    compute: Compute = "fp32"
    output: Literal["fp32"] | None = None
    scale: LossScale = LossScale()


def precision_of(value: Precision | Compute) -> Precision:
    """Turn the short form of a precision into the record; leave other values unchanged."""
    if isinstance(value, str) and value in FORMATS:
        return Precision(compute=value)
    return value
