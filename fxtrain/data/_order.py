"""In which order an epoch visits its rows: a pure function of seed, epoch and index."""

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fxtrain._errors import DataError
from fxtrain.data._permute import draw, permute, round_keys

__all__ = ["Order", "Units", "order_of", "seed_all"]

_BLOCK = 4096  # indices computed at a time


@attrs.frozen(eq=False)
class Units:
    """The rows, or ready-made batches, of one epoch in order.

    Attributes:
        length: How many.
        read: (start, stop) → those units.
    """

    length: int
    read: Callable[[int, int], Sequence[Any]]

    def stream(self, start: int, stop: int) -> Iterator[Any]:
        """Units from start to stop, read in blocks; past the end it starts over."""
        place = start
        while place < stop:
            low = place % self.length
            high = min(low + _BLOCK, self.length, low + stop - place)
            yield from self.read(low, high)
            place += high - low


@attrs.frozen(eq=False)
class Order:
    """How the units of every epoch are found.

    Attributes:
        epoch: Number of an epoch → its units.
        batched: Units are batches that a batch sampler made, not rows.
        shuffled: Epochs differ.
    """

    epoch: Callable[[int], Units]
    batched: bool
    shuffled: bool


def order_of(loader: DataLoader[Any], seed: int) -> Order:
    """The order in which a loader over a map-style dataset would visit it.

    torch's own samplers become pure functions with random access; any other sampler is
    iterated once per epoch under generators seeded from (seed, epoch), the same on every rank.

    Raises:
        DataError: the sampler already splits its rows over ranks.
    """
    if loader.batch_sampler is None:
        return _rows(loader.sampler, seed)
    if type(loader.batch_sampler) is BatchSampler:
        return _rows(loader.batch_sampler.sampler, seed)
    return _custom(loader.batch_sampler, seed, batched=True)


def _rows(sampler: Any, seed: int) -> Order:
    if isinstance(sampler, DistributedSampler):
        raise DataError(
            "This loader has a DistributedSampler, which already gives each rank its rows. "
            "Pass the loader without it (shuffle=True does the rest), or keep it and say so: "
            'Plan(data=fx.Data(source="sharded")).'
        )
    read = _READERS.get(type(sampler))
    return _custom(sampler, seed, batched=False) if read is None else read(sampler, seed)


def _sequential(sampler: Any, seed: int) -> Order:
    n = len(sampler.data_source)
    units = Units(n, lambda start, stop: range(start, stop))
    return Order(lambda epoch: units, batched=False, shuffled=False)


def _random(sampler: RandomSampler, seed: int) -> Order:
    n, count = len(sampler.data_source), sampler.num_samples

    def epoch(number: int) -> Units:
        keys = round_keys(seed, number)
        if sampler.replacement:
            return _computed(count, lambda index: draw(index, n, keys))
        if count <= n:
            return _computed(count, lambda index: permute(index, n, keys))
        # More samples than rows: one permutation after another, each with its own keys.
        return _computed(count, lambda index: _laps(index, n, seed, number))

    return Order(epoch, batched=False, shuffled=True)


def _laps(index: torch.Tensor, n: int, seed: int, number: int) -> torch.Tensor:
    parts = [
        permute(index[index // n == lap] % n, n, round_keys(seed, number, lap))
        for lap in torch.unique(index // n).tolist()
    ]
    return torch.cat(parts)


def _subset(sampler: SubsetRandomSampler, seed: int) -> Order:
    chosen = torch.as_tensor(list(sampler.indices), dtype=torch.int64)

    def epoch(number: int) -> Units:
        keys = round_keys(seed, number)
        return _computed(len(chosen), lambda index: chosen[permute(index, len(chosen), keys)])

    return Order(epoch, batched=False, shuffled=True)


def _weighted(sampler: WeightedRandomSampler, seed: int) -> Order:
    if not sampler.replacement:
        return _custom(sampler, seed, batched=False)
    edges = sampler.weights.double().cumsum(0)

    def epoch(number: int) -> Units:
        keys = round_keys(seed, number)

        def pick(index: torch.Tensor) -> torch.Tensor:
            # 53 random bits fill a float64 in [0, 1).
            where = draw(index, 1 << 53, keys).double() / (1 << 53) * edges[-1]
            return torch.searchsorted(edges, where, right=True).clamp(max=len(edges) - 1)

        return _computed(sampler.num_samples, pick)

    return Order(epoch, batched=False, shuffled=True)


_READERS: dict[type, Callable[[Any, int], Order]] = {
    SequentialSampler: _sequential,
    RandomSampler: _random,
    SubsetRandomSampler: _subset,
    WeightedRandomSampler: _weighted,
}


def _computed(length: int, find: Callable[[torch.Tensor], torch.Tensor]) -> Units:
    @functools.lru_cache(maxsize=4)  # a batch after another reads the same block
    def block(number: int) -> list[int]:
        low = number * _BLOCK
        return find(torch.arange(low, min(low + _BLOCK, length))).tolist()

    def read(start: int, stop: int) -> list[int]:
        found: list[int] = []
        for number in range(start // _BLOCK, (stop - 1) // _BLOCK + 1):
            low = number * _BLOCK
            found += block(number)[max(0, start - low) : stop - low]
        return found

    return Units(length, read)


def _custom(sampler: Any, seed: int, *, batched: bool) -> Order:
    """Indices of a sampler that only its author knows: taken down once per epoch."""

    def epoch(number: int) -> Units:
        parts: tuple[Any, ...] = (sampler, getattr(sampler, "sampler", None))
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(number)
            generator = getattr(part, "generator", None)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(round_keys(seed, number)[0] & ((1 << 62) - 1))
        with _own_generators(round_keys(seed, number)[0]):
            units = [list(unit) for unit in sampler] if batched else list(sampler)
        return Units(len(units), lambda start, stop: units[start:stop])

    return Order(epoch, batched=batched, shuffled=hasattr(sampler, "set_epoch"))


@contextmanager
def _own_generators(key: int) -> Iterator[None]:
    numpy: Any = sys.modules.get("numpy")
    kept = random.getstate()
    kept_numpy = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        try:
            seed_all(key)
            yield
        finally:
            random.setstate(kept)
            if numpy:
                numpy.random.set_state(kept_numpy)


def seed_all(key: int) -> None:
    """Seed Python's, torch's CPU and NumPy's (if it is imported) generators."""
    random.seed(key)
    torch.default_generator.manual_seed(key & ((1 << 62) - 1))
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed([key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF])
