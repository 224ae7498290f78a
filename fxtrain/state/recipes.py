"""How layers compute in float8 and smaller formats during training: one record per library."""

from typing import Any, Literal, cast

import attrs

from fxtrain._record import at_least, record
from fxtrain.errors import PlanError
from fxtrain.state.quantized_weights import names_of


@record
class Float8:
    """Products of linear layers in float8, by torchao. Weights stay in their own dtype.

    Attributes:
        scaling: tensorwise: one scale per tensor, the fastest; rowwise: one per row, more
            accurate; rowwise_with_gw_hp: rowwise, with gradients of weights in bf16, the most
            accurate.
        gather: fp8: FSDP casts shards to float8 before it gathers them, which needs tensorwise
            scaling; plan: it gathers in the dtype of the plan.
        pad: Pad inputs whose rows are not divisible by 16, at the cost of memory.
        emulate: Compute in high precision with values rounded to float8, on any device. To test
            a plan, not to train faster.
        min_features: Skip layers with fewer input or output features.
        skip: Names of modules whose layers stay as they are, as in `Bnb8`.
        skip_classes: Class names of modules to skip, with everything inside them.
        head: Convert the output head too.
    """

    kind: Literal["float8"] = attrs.field(default="float8", init=False)
    scaling: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    gather: Literal["plan", "fp8"] = "plan"
    pad: bool = False
    emulate: bool = False
    min_features: int = attrs.field(default=16, validator=at_least(1))
    skip: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    head: bool = False

    def __attrs_post_init__(self) -> None:
        if self.gather == "fp8" and self.scaling != "tensorwise":
            raise PlanError(
                f"Float8(gather='fp8', scaling={self.scaling!r}): torchao gathers float8 weights "
                f"with one scale per tensor only. Use scaling='tensorwise', or gather='plan'."
            )


@record
class MX:
    """Products of linear layers in microscaling formats, by torchao's prototypes.

    Attributes:
        format: mxfp8 and mxfp4: one scale per 32 values; nvfp4: one per 16, and random Hadamard
            transforms and stochastic rounding of gradients.
        grad_weight: Format of the products that give gradients of weights: format, or bf16, which
            is more accurate.
        emulate: As in `Float8`, for mxfp8 and mxfp4.
        min_features: As in `Float8`.
        skip: As in `Bnb8`.
        skip_classes: As in `Bnb8`.
        head: As in `Float8`.
    """

    kind: Literal["mx"] = attrs.field(default="mx", init=False)
    format: Literal["mxfp8", "mxfp4", "nvfp4"] = "mxfp8"
    grad_weight: Literal["format", "bf16"] = "format"
    emulate: bool = False
    min_features: int = attrs.field(default=32, validator=at_least(1))
    skip: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    head: bool = False

    def __attrs_post_init__(self) -> None:
        if self.format != "nvfp4":
            return
        if self.emulate:
            raise PlanError(
                "MX(format='nvfp4', emulate=True): torchao trains nvfp4 by Triton kernels only, "
                "and cannot emulate them. Use format='mxfp4', or a Blackwell GPU."
            )
        if self.grad_weight != "format":
            raise PlanError(
                "MX(format='nvfp4', grad_weight='bf16'): torchao computes all three products of a "
                "layer in nvfp4. Leave grad_weight out."
            )


@record
class TE:
    """Linear layers and layer norms of Transformer Engine, which computes in float8.

    Attributes:
        scaling: delayed: scales from the largest values of earlier steps, which checkpoints
            contain; current: from the tensor itself; block: one scale per block of 128 values;
            mxfp8: one per 32; nvfp4: one per 16.
        format: hybrid: e4m3 in forward and e5m2 in backward; e4m3 in both.
        margin: For delayed scaling: powers of two by which scales are smaller.
        history: For delayed scaling: steps whose largest values are kept.
        amax: For delayed scaling: the largest of the history, or the most recent value.
        evaluate: Compute in float8 in evaluation too.
        norms: Convert layer norms too.
        min_features: As in `Float8`.
        skip: As in `Bnb8`.
        skip_classes: As in `Bnb8`.
        head: As in `Float8`.
    """

    kind: Literal["te"] = attrs.field(default="te", init=False)
    scaling: Literal["delayed", "current", "block", "mxfp8", "nvfp4"] = "delayed"
    format: Literal["hybrid", "e4m3"] = "hybrid"
    margin: int = 0
    history: int = attrs.field(default=1024, validator=at_least(1))
    amax: Literal["max", "most_recent"] = "max"
    evaluate: bool = False
    norms: bool = True
    min_features: int = attrs.field(default=16, validator=at_least(1))
    skip: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    head: bool = False


Recipe = Float8 | MX | TE
RECIPES: tuple[type, ...] = (Float8, MX, TE)
_SHORT: dict[str, Any] = {
    **{
        name: (Float8, {"scaling": name})
        for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    },
    **{name: (MX, {"format": name}) for name in ("mxfp8", "mxfp4", "nvfp4")},
    "float8": (Float8, {}),
    "mx": (MX, {}),
    "te": (TE, {}),
}


def recipe_of(value: Recipe | str | None) -> Recipe | None:
    """The recipe of a short form, such as "rowwise" or "mxfp8"; everything else as it is.

    Example:
        >>> from fxtrain.state.recipes import recipe_of
        >>> recipe_of("mxfp4").format
        'mxfp4'
    """
    if not isinstance(value, str) or value not in _SHORT:
        return cast(Recipe | None, value)  # checked as the field is
    kind, fields = _SHORT[value]
    return kind(**fields)
