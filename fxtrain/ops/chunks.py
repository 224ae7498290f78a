"""One chunk of a tensor, as `torch.chunk` makes it."""

from torch import Tensor

__all__ = ["chunk_of"]


def chunk_of(tensor: Tensor, n: int, dim: int, index: int) -> Tensor:
    """One of the chunks that `torch.chunk` makes, without the others.

    Returns:
        A view. It is empty along `dim` where torch makes fewer chunks than requested, since the
        dimension is short.

    Example:
        >>> import torch
        >>> [chunk_of(torch.arange(5), 4, 0, index).tolist() for index in range(4)]
        [[0, 1], [2, 3], [4], []]
    """
    length = tensor.size(dim)
    size = -(-length // n)
    start = min(index * size, length)
    return tensor.narrow(dim, start, min(size, length - start))
