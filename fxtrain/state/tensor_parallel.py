"""The config of tensor parallelism. Data only."""

from typing import Literal

from fxtrain._record import record


@record
class Style:
    """How to split the modules whose names match a pattern over the tensor axis.

    Attributes:
        modules: Pattern of module names, such as `layers.*.mlp.up_proj`.
        style: colwise: a linear layer computes its part of the outputs, which are not gathered;
            colwise_gather: they are gathered; rowwise: a linear layer takes such parts, or an
            embedding has a part of the vocabulary, and outputs are summed; reduce: parameters are
            not split, and each rank's gradient is a part of a sum, as for a norm over heads;
            expert: a mixture of experts, with `num_experts` and their stacked weights, gives each
            rank whole experts. Its forward takes tokens (T, D), the experts of each (T, K) and
            their weights (T, K); `num_experts` as an expert means none.
    """

    modules: str
    style: Literal["colwise", "colwise_gather", "rowwise", "reduce", "expert"]


@record
class TP:
    """Layers split over the ranks of the mesh's tensor axis, by torch's DTensor.

    Attributes:
        styles: How to split which modules. Empty uses the plan of a transformers model, or one
            for layers named as in Llama or GPT-2.
        sequence: Between the first block and the last, split activations outside split layers
            along the sequence (dimension 1), which divides their memory as well.
        loss: Keep logits of `colwise_gather` modules sharded, and compute cross-entropy on the
            shards: the loss function gets a DTensor and uses only `cross_entropy` on it.
    """

    styles: tuple[Style, ...] = ()
    sequence: bool = False
    loss: bool = False
