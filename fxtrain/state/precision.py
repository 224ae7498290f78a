"""The dtypes of a plan: of computation, of quantized weights, and of layers in float8."""

from collections.abc import Sequence
from typing import Any, Literal, cast

import attrs

from fxtrain._record import above, at_least, between, canonical, record
from fxtrain.errors import PlanError

QuantizeKind = Literal["bnb8", "bnb4", "torchao"]
_to_names: Any = canonical(tuple[str, ...])


def as_names(value: str | Sequence[str]) -> tuple[str, ...]:
    """One name as a tuple of it; a list as a tuple."""
    return (value,) if isinstance(value, str) else _to_names(value)


@record
class Bnb8:
    """Weights in int8 by bitsandbytes (LLM.int8): one scale per output row.

    Attributes:
        threshold: Input features with a value above this are computed in half precision; 0
            computes all of them in int8.
        skip: Names of modules whose weights stay as they are: whole components of a dotted path,
            such as "mlp.gate" or "layers.0"; `*` stands for any part of one component.
        skip_classes: Class names of modules to skip, with everything inside them.
        keep_fp32: Names, as in `skip`, of modules that are skipped and converted to fp32. The code
            of the model, or autocast, has to convert what enters and leaves them.
        head: Quantize the output head too. It is skipped by default, as the library advises.
    """

    kind: Literal["bnb8"] = attrs.field(default="bnb8", init=False)
    threshold: float = attrs.field(default=6.0, validator=at_least(0))
    skip: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    keep_fp32: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    head: bool = False


@record
class Bnb4:
    """Weights in four bits by bitsandbytes: one scale per block of a flattened weight.

    Attributes:
        quant_type: nf4, whose values follow a normal distribution, or fp4, a float of four bits.
        double_quant: Quantize the scales too, which saves 0.4 bits per weight.
        blocksize: Elements with the same scale.
        compute: Format of the matrix product; None computes in the format of the input.
        skip: As in `Bnb8`.
        skip_classes: As in `Bnb8`.
        keep_fp32: As in `Bnb8`.
        head: As in `Bnb8`.
    """

    kind: Literal["bnb4"] = attrs.field(default="bnb4", init=False)
    quant_type: Literal["nf4", "fp4"] = "nf4"
    double_quant: bool = True
    blocksize: Literal[64, 128, 256, 512, 1024, 2048, 4096] = 64
    compute: Literal["fp32", "bf16", "fp16"] | None = "bf16"
    skip: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    keep_fp32: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    head: bool = False


@record
class Torchao:
    """Weights as tensors of torchao, computed by its kernels.

    Attributes:
        weights: int8 and float8 have one scale per output row, int4 one per `group`.
        activations: Quantize the input of each layer too, by row: int8 with int8 weights, float8
            with float8 weights. None computes in the format of the input.
        group: Elements of a row with the same scale, for int4.
        skip: As in `Bnb8`.
        skip_classes: As in `Bnb8`.
        keep_fp32: As in `Bnb8`.
        head: As in `Bnb8`.
    """

    kind: Literal["torchao"] = attrs.field(default="torchao", init=False)
    weights: Literal["int8", "int4", "float8"] = "int8"
    activations: Literal["int8", "float8"] | None = None
    group: Literal[32, 64, 128, 256] = 128
    skip: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    keep_fp32: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    head: bool = False

    def __attrs_post_init__(self) -> None:
        if self.activations is not None and self.activations != self.weights:
            raise PlanError(
                f"Torchao(weights={self.weights!r}, activations={self.activations!r}): both are "
                f"int8 or both float8. Leave activations out to compute in the format of the input."
            )


Quantize = Bnb8 | Bnb4 | Torchao
QUANTIZE: tuple[type, ...] = (Bnb8, Bnb4, Torchao)
_BY_KIND = {"bnb8": Bnb8, "bnb4": Bnb4, "torchao": Torchao}


def quantize_of(value: Quantize | QuantizeKind | None) -> Quantize | None:
    """The record of a kind of quantization; everything else as it is."""
    config = _BY_KIND[value]() if isinstance(value, str) and value in _BY_KIND else value
    return cast(Quantize | None, config)  # the plan's check refuses anything else


FORMATS = ("fp32", "bf16", "fp16", "fp8")
Compute = Literal["fp32", "bf16", "fp16", "fp8"]


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
    skip: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=as_names)
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
    skip: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=as_names)
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
    skip: tuple[str, ...] = attrs.field(default=(), converter=as_names)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=as_names)
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
    """The recipe of a short form, such as "rowwise" or "mxfp8"; everything else as it is."""
    if not isinstance(value, str) or value not in _SHORT:
        return cast(Recipe | None, value)  # checked as the field is
    kind, fields = _SHORT[value]
    return kind(**fields)


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
    params: Literal["fp32", "keep"] = "fp32"
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
