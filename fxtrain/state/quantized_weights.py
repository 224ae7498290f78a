"""Formats of quantised weights, one record for each group of layers of a library."""

from collections.abc import Sequence
from typing import Any, Literal, cast

import attrs

from fxtrain._record import at_least, canonical, record
from fxtrain.errors import PlanError

QuantizeKind = Literal["bnb8", "bnb4", "torchao"]
_to_names: Any = canonical(tuple[str, ...])


def names_of(value: str | Sequence[str]) -> tuple[str, ...]:
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
        head: Quantise the output head too. It is skipped by default, as the library advises.
    """

    kind: Literal["bnb8"] = attrs.field(default="bnb8", init=False)
    threshold: float = attrs.field(default=6.0, validator=at_least(0))
    skip: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    keep_fp32: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    head: bool = False


@record
class Bnb4:
    """Weights in four bits by bitsandbytes: one scale per block of a flattened weight.

    Attributes:
        quant_type: nf4, whose values follow a normal distribution, or fp4, a float of four bits.
        double_quant: Quantise the scales too, which saves 0.4 bits per weight.
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
    skip: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    keep_fp32: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    head: bool = False


@record
class Torchao:
    """Weights as tensors of torchao, computed by its kernels.

    Attributes:
        weights: int8 and float8 have one scale per output row, int4 and int2 one per `group`.
        activations: Quantise the input of each layer too, by row: int8 with int8 weights, float8
            with float8 weights. None computes in the format of the input.
        group: Elements of a row with the same scale, for int4 and int2.
        skip: As in `Bnb8`.
        skip_classes: As in `Bnb8`.
        keep_fp32: As in `Bnb8`.
        head: As in `Bnb8`.
    """

    kind: Literal["torchao"] = attrs.field(default="torchao", init=False)
    weights: Literal["int8", "int4", "int2", "float8"] = "int8"
    activations: Literal["int8", "float8"] | None = None
    group: Literal[32, 64, 128, 256] = 128
    skip: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    skip_classes: tuple[str, ...] = attrs.field(default=(), converter=names_of)
    keep_fp32: tuple[str, ...] = attrs.field(default=(), converter=names_of)
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


def quantize_of(
    value: Bnb8 | Bnb4 | Torchao | QuantizeKind | None,
) -> Bnb8 | Bnb4 | Torchao | None:
    """The record of a kind of quantisation; everything else as it is."""
    config = _BY_KIND[value]() if isinstance(value, str) and value in _BY_KIND else value
    return cast(Quantize | None, config)  # the plan's check refuses anything else
