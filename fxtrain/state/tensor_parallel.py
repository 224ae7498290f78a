"""The config of tensor parallelism. Data only."""

from typing import Literal

from fxtrain._record import record

__all__ = ["TP", "Style"]


@record
class Style:
    """How the modules whose names match a pattern are split over the tensor axis.

    Attributes:
        modules: Pattern of module names, such as `layers.*.mlp.up_proj`.
        style: colwise: a linear layer makes its part of the outputs, which stay apart;
            colwise_gather: they are gathered; rowwise: a linear layer takes such parts, or an
            embedding holds a part of the vocabulary, and outputs are summed; reduce: parameters
            stay whole, and each rank's gradient is a part of a sum, as for a norm over heads;
            expert: a mixture of experts, with `num_experts` and their weights stacked, gives
            each rank whole experts. Its forward takes tokens (T, D), the experts of each (T, K)
            and their weights (T, K); `num_experts` as an expert means none.
    """

    modules: str
    style: Literal["colwise", "colwise_gather", "rowwise", "reduce", "expert"]


@record
class TP:
    """Layers split over the ranks of the mesh's tensor axis, by torch's DTensor.

    Attributes:
        styles: What is split how. Empty takes the plan that a transformers model carries, or
            one for layers named as in Llama or GPT-2.
        sequence: Between the first block and the last, activations outside of split layers are
            split along the sequence (dimension 1), which takes their memory down likewise.
        loss: Logits of `colwise_gather` modules stay split, and cross-entropy is computed on
            the parts: the loss function gets a DTensor and uses `cross_entropy` alone on it.
    """

    styles: tuple[Style, ...] = ()
    sequence: bool = False
    loss: bool = False
