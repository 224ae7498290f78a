"""One part of a tensor, as torch cuts it."""

from torch import Tensor

__all__ = ["chunk_of"]


def chunk_of(whole: Tensor, n: int, dim: int, index: int) -> Tensor:
    """One of the chunks that `torch.chunk` makes, without the others.

    Returns:
        A view; with no entries along the dimension where torch, which makes fewer chunks than
        asked of a short dimension, has none left.

    Example:
        >>> import torch
        >>> [chunk_of(torch.arange(5), 4, 0, index).tolist() for index in range(4)]
        [[0, 1], [2, 3], [4], []]
    """
    length = whole.size(dim)
    size = -(-length // n)
    start = min(index * size, length)
    return whole.narrow(dim, start, min(size, length - start))
