"""The config of pipeline parallelism. Data only."""

from typing import Literal

import attrs

from fxtrain._record import at_least, record
from fxtrain.state.fsdp import FSDP


@record
class PP:
    """Consecutive parts of the model on consecutive ranks: torch's pipeline schedules.

    The ranks of the mesh's pipeline axis read the same rows, and each runs some stages of the
    model; those of the data axes hold replicas or shards, whose gradients are averaged. At one
    rank this is the plain model.

    Attributes:
        schedule: Order of the forward and backward passes of micro-batches: gpipe, 1f1b, with
            one stage per rank; looped_bfs, interleaved_1f1b, interleaved_zero_bubble, with several
            in a loop over the ranks; zbv_zero_bubble and dualpipe_v, with two, there and back.
        microbatches: Micro-batches into which each rank's batch is split; None is one per stage.
        split: Names of the modules with which the second and later stages begin, in the order
            in which they run. Empty splits at the model's blocks, into stages with similar
            numbers of parameters.
        stages_per_rank: Stages that a rank runs; None is 1, or 2 if the schedule has several.
        shared: Patterns (`head.*`) of names of parameters that every stage holds, with summed
            gradients; for those that run in another order than they are registered in.
        stages: How each stage is held on the other axes: sharded over the data axes and, with
            `tensor` in it, split over the tensor axis. None holds replicas.
        outputs: Whether a forward without gradients returns the outputs on every rank, or only
            on the rank of the last stage, and None on the others.
    """

    kind: Literal["pp"] = attrs.field(default="pp", init=False)
    schedule: Literal[
        "gpipe",
        "1f1b",
        "looped_bfs",
        "interleaved_1f1b",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipe_v",
    ] = "1f1b"
    microbatches: int | None = attrs.field(default=None, validator=at_least(1))
    split: tuple[str, ...] = ()
    stages_per_rank: int | None = attrs.field(default=None, validator=at_least(1))
    shared: tuple[str, ...] = ()
    stages: FSDP | None = None
    outputs: Literal["all", "last"] = "all"
