"""What is compared, and what a comparison found."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
from torch import Tensor, nn

from fxtrain._display import describe


@attrs.frozen(kw_only=True, eq=False)
class Case:
    """A model and data on which plans are compared.

    Attributes:
        build: () → the model. Called once or twice per plan, each time with equally seeded random
            generators, so that all plans get the same weights.
        batches: The data. With several ranks, each takes every n-th batch.
        forward: (model, batch) → the outputs to compare, as one tensor. By default the model is
            called with a tuple's or list's entries, a dict's entries by name, or the batch itself.
        outputs: "logits" also compares the best entry of the last dim, "embeddings" the direction
            along the last dim.
        loss: (model, batch) → the training loss, for a curve.
        optimizer: The optimizer factory for the curve, as `fx.wrap` takes it.
    """

    build: Callable[[], nn.Module]
    batches: Sequence[Any] = attrs.field(repr=describe)
    forward: Callable[[Any, Any], Tensor] | None = None
    outputs: Literal["values", "logits", "embeddings"] = "values"
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Any = None


@attrs.frozen(kw_only=True)
class LayerError:
    """How far the outputs of one layer are from the reference, over all batches.

    The inputs of a layer differ too, so that errors of earlier layers are included.

    Attributes:
        name: Its name in the model; empty for the model's outputs.
        relative: Norm of the difference over the norm of the reference.
        snr_db: The same as a signal-to-noise ratio in decibels: -20 · log10(relative).
        largest: Largest absolute difference of an entry.
    """

    name: str
    relative: float
    snr_db: float
    largest: float


def error_of(name: str, *, noise: float, signal: float, largest: float) -> LayerError:
    """From sums of squares, of the difference and of the reference."""
    if noise == 0:
        return LayerError(name=name, relative=0.0, snr_db=math.inf, largest=largest)
    relative = math.sqrt(noise / signal) if signal else math.inf
    return LayerError(
        name=name, relative=relative, snr_db=-20 * math.log10(relative), largest=largest
    )


@attrs.frozen(kw_only=True)
class Compared:
    """One plan beside the reference.

    Attributes:
        name: Its name.
        outputs: The error of the model's outputs.
        layers: Errors of the innermost modules, in the order of the model.
        agreement: Share of rows whose largest entry is that of the reference; None unless the
            outputs are logits.
        cosine: Smallest cosine between an embedding and that of the reference; None unless the
            outputs are embeddings.
        weight_bytes: Bytes of parameters and buffers.
        losses: The training loss of each update, of its last micro-batch; empty without a curve.
    """

    name: str
    outputs: LayerError
    layers: tuple[LayerError, ...]
    agreement: float | None = None
    cosine: float | None = None
    weight_bytes: int
    losses: tuple[float, ...] = ()


@attrs.frozen(kw_only=True)
class Comparison:
    """Plans beside a reference.

    Attributes:
        reference: The name of the reference.
        weight_bytes: Bytes of its parameters and buffers.
        losses: Its training loss of each update; empty without a curve.
        plans: The others, in the order given.
    """

    reference: str
    weight_bytes: int
    losses: tuple[float, ...] = ()
    plans: tuple[Compared, ...]
