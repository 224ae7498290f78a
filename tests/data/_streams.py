"""Iterable datasets that tests read."""

from torch.utils.data import IterableDataset

__all__ = ["Numbers"]


class Numbers(IterableDataset):
    """0 to n - 1."""

    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return iter(range(self.n))
