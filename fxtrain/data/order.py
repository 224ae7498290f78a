"""The order in which an epoch visits its units: a pure function of seed, epoch and index."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fxtrain.data.generators import BorrowedGenerators
from fxtrain.data.loader_errors import safe_length
from fxtrain.data.permutation import (
    hash_key,
    permutation,
    permutation_in_blocks,
    round_keys,
    uniform,
    uniform_below,
)
from fxtrain.errors import DataError

_SAMPLER_CHUNK = 512  # units requested from a custom sampler at a time


@attrs.frozen(eq=False)
class EpochOrder:
    """The rows of one epoch in order, with random access.

    Attributes:
        length: How many rows the epoch has.
        take: int64 indices, 1-D → what the dataset is asked for at each of them.
        shuffled: Whether another epoch has another order.
    """

    length: int
    take: Callable[[Tensor], list[Any]]
    shuffled: bool = True


@attrs.frozen(eq=False)
class BlockSampler:
    """Random order in which blocks of consecutive rows are visited one after the other.

    Attributes:
        rows: Rows of the dataset.
        block: Rows of a block.
    """

    rows: int
    block: int

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        order = permutation_in_blocks(self.rows, self.block, 0, 0)
        return iter(order(torch.arange(self.rows, device="cpu")).tolist())


def find_order(sampler: Any, seed: int, epoch: int) -> EpochOrder | None:
    """The order of one of torch's own samplers; None for any other sampler."""
    finder = _FINDERS.get(type(sampler))
    return None if finder is None else finder(sampler, seed, epoch)


def length_of(sampler: Any) -> int | None:
    """How many units a sampler yields; None if it has no length.

    Raises:
        DataError: its length is invalid.
    """
    try:
        return safe_length(sampler)
    except TypeError:
        return None


def refuse_split(sampler: Any) -> None:
    """Refuse a sampler that gives each rank its own rows.

    Raises:
        DataError: it is, or wraps, a DistributedSampler.
    """
    if any(isinstance(part, DistributedSampler) for part in _sampler_chain(sampler)):
        raise DataError(
            "This loader has a DistributedSampler, which already gives each rank its rows. "
            "Pass the loader without it (shuffle=True replaces it), or keep it and set "
            'fx.Plan(data=fx.Data(source="sharded")).'
        )


class CustomOrder:
    """What a custom sampler yields in one epoch.

    It runs with its own generators, seeded from (seed, epoch), so that all ranks see the same
    order. It may also use `set_epoch(epoch)` and a `generator` attribute.

    Args:
        sampler: Any iterable.
        seed: The plan's.
        epoch: From 0.
    """

    def __init__(self, sampler: Any, seed: int, epoch: int) -> None:
        self._sampler, self._epoch = sampler, epoch
        self._key = hash_key(seed, epoch)
        self._lent = BorrowedGenerators(self._key)
        self._told = False

    def __iter__(self) -> Iterator[Any]:
        self._told = _set_epoch(self._sampler, self._epoch, self._key)
        with self._lent():
            units = iter(self._sampler)
        while block := self._pull(units):
            yield from block

    @property
    def shuffled(self) -> bool:
        """Whether another epoch may have another order, as far as is known so far."""
        return self._told or self._lent.used

    def _pull(self, units: Iterator[Any]) -> list[Any]:
        with self._lent():
            return list(itertools.islice(units, _SAMPLER_CHUNK))


def _set_epoch(sampler: Any, epoch: int, key: int) -> bool:
    """Call `set_epoch` of a sampler and of those it wraps; whether that changes the order."""
    told = False
    for part in _sampler_chain(sampler):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
            # torch's DistributedSampler, and samplers modelled on it, have this attribute.
            told = told or getattr(part, "shuffle", True) is not False
        if isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.manual_seed(key)
            told = True
    return told


def _sampler_chain(sampler: Any) -> Iterator[Any]:
    """A sampler, the one that it wraps, and so on."""
    for _ in range(8):  # samplers that wrap each other would never end
        if sampler is None:
            return
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _sequential(sampler: SequentialSampler, seed: int, epoch: int) -> EpochOrder:
    return EpochOrder(safe_length(sampler), Tensor.tolist, shuffled=False)


def _random(sampler: RandomSampler, seed: int, epoch: int) -> EpochOrder:
    n, count = safe_length(sampler.data_source), sampler.num_samples
    keys = round_keys(seed, epoch)
    if sampler.replacement:
        return EpochOrder(count, lambda places: uniform_below(places, n, keys).tolist())
    if count > n:
        return EpochOrder(count, lambda places: _repeated_permutations(places, n, seed, epoch))
    find = permutation(n, keys)
    return EpochOrder(count, lambda places: find(places).tolist())


def _repeated_permutations(places: Tensor, n: int, seed: int, epoch: int) -> list[int]:
    """More samples than rows: consecutive permutations, each with its own keys."""
    found, laps = torch.empty_like(places), places // n
    for lap in laps.unique().tolist():
        here = laps == lap
        words = (seed, epoch, lap) if lap else (seed, epoch)
        found[here] = permutation(n, round_keys(*words))(places[here] % n)
    return found.tolist()


def _blocks(sampler: BlockSampler, seed: int, epoch: int) -> EpochOrder:
    find = permutation_in_blocks(sampler.rows, sampler.block, seed, epoch)
    return EpochOrder(sampler.rows, lambda places: find(places).tolist())


def _subset(sampler: SubsetRandomSampler, seed: int, epoch: int) -> EpochOrder:
    chosen = sampler.indices
    find = permutation(len(chosen), round_keys(seed, epoch))
    return EpochOrder(len(chosen), lambda places: [chosen[i] for i in find(places).tolist()])


def _weighted(sampler: WeightedRandomSampler, seed: int, epoch: int) -> EpochOrder:
    count = sampler.num_samples
    if not sampler.replacement:
        generator = torch.Generator().manual_seed(hash_key(seed, epoch))
        # Each draw depends on those before it, so a table is unavoidable.
        table = torch.multinomial(sampler.weights, count, replacement=False, generator=generator)
        return EpochOrder(count, lambda places: table[places].tolist())
    edges = sampler.weights.double().cumsum(0)
    last = int(sampler.weights.nonzero()[-1])
    keys = round_keys(seed, epoch)

    def take(places: Tensor) -> list[int]:
        drawn = uniform(places, keys) * edges[-1]
        # Rounding may reach the upper edge, where no weight remains.
        return torch.searchsorted(edges, drawn, right=True).clamp(max=last).tolist()

    return EpochOrder(count, take)


_FINDERS: dict[type, Callable[[Any, int, int], EpochOrder]] = {
    SequentialSampler: _sequential,
    RandomSampler: _random,
    BlockSampler: _blocks,
    SubsetRandomSampler: _subset,
    WeightedRandomSampler: _weighted,
}
