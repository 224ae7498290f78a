"""The config of context parallelism, and which tokens of a sequence a rank gets. Data only."""

from typing import Literal

import attrs

from fxtrain._record import at_least, record


@record
class CP:
    """Sequences split over the ranks of the mesh's context axis: torch's ring attention.

    Attributes:
        batch: Patterns of names of the tensors in a batch to split, such as `input_ids`, or `0`
            for the first of a tuple. Empty splits every tensor that has dimension `dim`.
        dim: Their token dimension.
        tables: Patterns of names of parameters and buffers with one row per position, such as
            learned position embeddings or rotary angles; forward sees the rows of this rank's
            tokens.
        balance: Give each rank two parts, one from the start and its mirror image from the end,
            so that causal attention costs every rank the same.
        rotate: How keys and values reach the other ranks: allgather: all at once; alltoall:
            from neighbour to neighbour, which stores the parts of two ranks at a time.
        causal: Treat attention as causal whatever the model passes, and drop masks. For models
            that build a mask from positions, as those of transformers do.
            that build a mask from positions, as those of transformers do.
    """

    batch: tuple[str, ...] = ()
    dim: int = attrs.field(default=1, validator=at_least(0))
    tables: tuple[str, ...] = ()
    balance: bool = True
    rotate: Literal["allgather", "alltoall"] = "allgather"
    causal: bool = False


def token_ranges(
    length: int, ranks: int, rank: int, *, balance: bool
) -> tuple[tuple[int, int], ...] | None:
    """Start and number of the tokens that a rank gets of a sequence, in their local order.

    None if the length is not divisible by the ranks, or by twice as many with balance.

    Example:
        >>> token_ranges(8, 2, 0, balance=True), token_ranges(8, 2, 1, balance=True)
        (((0, 2), (6, 2)), ((2, 2), (4, 2)))
        >>> token_ranges(8, 2, 1, balance=False)
        ((4, 4),)
    """
    if ranks == 1:
        return ((0, length),)
    parts = 2 * ranks if balance else ranks
    if length % parts:
        return None
    size = length // parts
    mine = (rank, parts - 1 - rank) if balance else (rank,)
    return tuple((part * size, size) for part in mine)
