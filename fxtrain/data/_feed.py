"""The user's loader, rebuilt to read the rows that we choose."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from fxtrain.data._order import seed_all
from fxtrain.data._permute import round_keys

__all__ = ["Feed", "rebuild", "reseeding"]

# What a loader keeps when its sampler is replaced.
_SETTINGS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


class Feed:
    """A sampler that yields whatever it was last told to.

    A loader with persistent workers reads its sampler anew for every epoch but cannot be
    given another one, so the sampler itself is told where to start.
    """

    def __init__(self) -> None:
        self.next: Callable[[], Iterator[Any]] = lambda: iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.next()


def rebuild(loader: DataLoader[Any], dataset: Any, **changes: Any) -> DataLoader[Any]:
    """The same loader over another dataset and sampler; every other setting stays."""
    known = inspect.signature(DataLoader.__init__).parameters
    settings = {name: getattr(loader, name) for name in _SETTINGS if name in known}
    if getattr(loader, "pin_memory_device", ""):
        settings["pin_memory_device"] = loader.pin_memory_device
    if isinstance(dataset, IterableDataset) and not settings["num_workers"]:
        settings["prefetch_factor"] = None
    # A generator of its own: torch draws the workers' base seed from the global one else.
    return DataLoader(dataset, generator=torch.Generator(), **(settings | changes))


@attrs.frozen
class Tagged:
    """An index, or list of them, with the seed of whoever loads it."""

    index: Any
    seed: int


class _Seeded(Dataset[Any]):
    """A dataset whose workers are seeded anew for every fetch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        fetch_all = getattr(dataset, "__getitems__", None)
        self._fetch_all = callable(fetch_all)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, tagged: Tagged) -> Any:
        seed_all(tagged.seed)
        return self._dataset[tagged.index]

    def __getitems__(self, tagged: list[Tagged]) -> Any:
        (batch,) = tagged
        seed_all(batch.seed)
        if self._fetch_all:
            return self._dataset.__getitems__(batch.index)
        return [self._dataset[index] for index in batch.index]


def reseeding(
    dataset: Any, *, batched: bool
) -> tuple[Any, Callable[[Any, int, int, int, int], Any]]:
    """A dataset for workers, and the function that tags what they are to load.

    The random numbers of a fetch then depend on (seed, epoch, first row, rank) only, and not
    on which worker serves it or what it did before.
    """

    def tag(index: Any, seed: int, epoch: int, base: int, rank: int) -> Any:
        tagged = Tagged(index, round_keys(seed, epoch, base, rank, count=1)[0])
        return [tagged] if batched else tagged

    return _Seeded(dataset), tag


def worker_of() -> tuple[int, int]:
    """Number of this worker and how many there are; (0, 1) outside of workers."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
