"""The user's loader: its settings, and the same loader over other indices."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from fxtrain.data.fetch import owner_of
from fxtrain.data.order import refuse_split
from fxtrain.data.rank_slices import Batching
from fxtrain.errors import DataError
from fxtrain.state import Plan

# Settings that a loader keeps when it reads other indices.
_SETTINGS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


class FedSampler:
    """A sampler that yields the indices it was last given.

    A DataLoader with persistent workers restarts its sampler in each epoch and cannot be
    given another one.
    """

    def __init__(self) -> None:
        self._indices: Iterator[Any] = iter(())

    def give(self, indices: Iterator[Any]) -> "FedSampler":
        """Make the next iteration of the loader read these."""
        self._indices = indices
        return self

    def __iter__(self) -> Iterator[Any]:
        return self._indices


def read_loader(loader: DataLoader[Any], ranks: int, plan: Plan) -> tuple[Batching, Any]:
    """How a loader's units are distributed over the ranks, without touching the dataset.

    Returns:
        That, and the sampler, an iterable over units; None for an iterable dataset.

    Raises:
        DataError: the loader cannot be split over this many ranks.
    """
    _check_rebuildable(loader)
    rows, sampler = _rows_of(loader)
    collates = loader.batch_sampler is not None
    even = "drop" if rows is not None and rows[1] else plan.even
    shares = plan.batch == "global"
    if plan.data.source != "sharded":
        refuse_split(owner_of(loader.dataset), sampler)
    if rows is None and collates:
        batching = Batching(per_rank=1, ranks=ranks, even=even, unit="batch", shared=shares)
        return batching, sampler
    if rows is None:
        if shares and ranks > 1:
            raise DataError(
                f'batch="global": a loader with batch_size=None yields single items, which '
                f'{ranks} ranks cannot share. Give it a batch_size, or use batch="per_rank".'
            )
        return Batching(per_rank=1, ranks=ranks, even=even, unit="item"), sampler
    size = share_of(rows[0], ranks) if shares else rows[0]
    return Batching(per_rank=size, ranks=ranks, even=even), sampler


def rebuild(loader: DataLoader[Any], dataset: Any, **changes: Any) -> DataLoader[Any]:
    """The same loader over another dataset or sampler, with all other settings unchanged.

    Its random base seed is drawn from a separate generator, so that iterating draws nothing
    from the process's.
    """
    settings = {name: getattr(loader, name) for name in _SETTINGS}
    if loader.pin_memory_device:
        settings["pin_memory_device"] = loader.pin_memory_device
    settings |= {"collate_fn": loader.collate_fn, "generator": torch.Generator()}
    return DataLoader(dataset, **(settings | changes))


def with_shareable_batches(loader: DataLoader[Any], ranks: int) -> DataLoader[Any]:
    """The same loader, with global batches of a few more rows if ranks cannot share its own.

    For metrics, whose values do not depend on how rows are batched.

    Raises:
        DataError: the loader cannot be read through another one.
    """
    if not loader.batch_size or not loader.batch_size % ranks:
        return loader
    _check_rebuildable(loader)
    changes: dict[str, Any] = {"batch_size": -(-loader.batch_size // ranks) * ranks}
    if not isinstance(loader.dataset, IterableDataset):
        changes["sampler"] = loader.sampler
    return rebuild(loader, loader.dataset, drop_last=loader.drop_last, **changes)


def _rows_of(loader: DataLoader[Any]) -> tuple[tuple[int, bool] | None, Any]:
    """(batch size, whether a short batch is dropped) if units are rows; and the sampler."""
    if isinstance(loader.dataset, IterableDataset):
        size = loader.batch_size
        return (None if size is None else (size, loader.drop_last)), None
    # A BatchSampler as `sampler` with batch_size=None asks the dataset for whole lists.
    chosen: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if type(chosen) is BatchSampler:
        return (chosen.batch_size, chosen.drop_last), chosen.sampler
    return None, chosen


def share_of(size: int, ranks: int) -> int:
    """One rank's rows of a global batch.

    Raises:
        DataError: they are not equal for all ranks.
    """
    part, rest = divmod(size, ranks)
    if rest:
        near = [str(n * ranks) for n in (part, part + 1) if n]
        raise DataError(
            f'batch="global": a batch of {size} rows is not divisible by {ranks} ranks. '
            f'Use batch_size={" or ".join(near)}, or batch="per_rank".'
        )
    return part


def _check_rebuildable(loader: DataLoader[Any]) -> None:
    kind = type(loader)
    if not loader.in_order and loader.num_workers:
        raise DataError(
            "DataLoader(in_order=False): batches arrive in the order in which workers finish, so "
            "a position cannot record which rows were seen. Use in_order=True."
        )
    for name in ("__iter__", "_get_iterator"):
        # torchdata's loader adds a state_dict, which positions replace here.
        if getattr(kind, name) is not getattr(DataLoader, name) and not any(
            base.__module__.startswith("torchdata.") for base in kind.__mro__
        ):
            raise DataError(
                f"{kind.__name__} overrides DataLoader.{name}, which sharding would bypass: it "
                f"reads the dataset through its own loader. Pass a plain DataLoader, and do "
                f"that work in collate_fn or in the loop."
            )
