"""The dtypes of a plan."""

from typing import Literal

import attrs

from fxtrain._record import above, at_least, between, record
from fxtrain.errors import PlanError
from fxtrain.state.recipes import MX, TE, Float8, recipe_of

FORMATS = ("fp32", "bf16", "fp16", "fp8")


Compute = Literal["fp32", "bf16", "fp16", "fp8"]


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
        compute: Dtype of autocast regions; fp32 means no autocast. fp8 means autocast to bf16,
            with linear layers that compute as `recipe` says.
        recipe: With fp8 only: fx.Float8(), the default, fx.MX() or fx.TE(), or a short form: the
            scaling of a Float8, such as "rowwise", the format of an MX, such as "mxfp8", or "te".
        output: Dtype of the model's floating-point outputs; None leaves them unchanged.
        params: Dtype of trained parameters, and so of optimizer states, where `compute` is another:
            "fp32" converts those in half precision in `fx.wrap`, "keep" leaves them as the model
            has them.
        scale: Loss scale, used with fp16 only.
    """

    compute: Compute = "fp32"
    recipe: Float8 | MX | TE | None = attrs.field(
        default=attrs.Factory(
            lambda self: Float8() if self.compute == "fp8" else None, takes_self=True
        ),
        converter=recipe_of,
    )
    output: Literal["fp32"] | None = None
    params: Literal["fp32", "keep"] = attrs.field(default="fp32", metadata={"added": True})
    scale: LossScale = LossScale()

    def __attrs_post_init__(self) -> None:
        if (self.recipe is not None) != (self.compute == "fp8"):
            raise PlanError(
                f"Precision(compute={self.compute!r}, recipe={self.recipe!r}): a recipe says how "
                f"layers compute in fp8. Use compute='fp8', or leave recipe out."
            )

    @property
    def dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """The dtype of autocast regions, and of what no recipe converts."""
        return "bf16" if self.compute == "fp8" else self.compute


def precision_of(value: Precision | Compute) -> Precision:
    """Turn the short form of a precision into the record; leave other values unchanged."""
    if isinstance(value, str) and value in FORMATS:
        return Precision(compute=value)
    return value
