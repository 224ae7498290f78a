"""The config of context parallelism, and which tokens of a sequence a rank holds. Data only."""

from typing import Literal

import attrs

from fxtrain._record import at_least, record

__all__ = ["CP", "token_ranges"]


@record
class CP:
    """Sequences in parts, one part a rank of the mesh's context axis: torch's ring attention.

    Attributes:
        batch: Patterns of names of the tensors in a batch that are cut, such as `input_ids`,
            or `0` for the first of a tuple. Empty cuts every tensor that has dimension `dim`.
        dim: Their dimension of tokens.
        tables: Patterns of names of parameters and buffers with one row per position, such as
            learned positions or angles of rotations; forward sees the rows of this rank's
            tokens.
        balance: A rank holds two parts, one from the start and its mirror from the end, so
            that causal attention costs every rank the same.
        rotate: How keys and values reach the other ranks: allgather: all at once; alltoall:
            from neighbour to neighbour, which holds two ranks' part at a time.
        causal: Attention is causal whatever the model says, and masks are left out. For models
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
    """Start and number of the tokens that a rank holds of a sequence, in the order it holds them.

    None if the length does not divide: by the ranks, or by twice as many with balance.

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
