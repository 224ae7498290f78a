"""The order in which an epoch visits its units: a pure function of seed, epoch and index.

Entry i of a permutation is computed from (keys, i) alone, so any rank can enter an epoch
anywhere, in constant time. All arithmetic stays below 2**62: int64 never overflows.
"""

import functools
import hashlib
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from fxtrain._words import canonical_text
from fxtrain.errors import DataError

HEAD = 1000  # units of an order, from its start, of which ranks and positions have a digest
_SAMPLER_CHUNK = 512  # units requested from a custom sampler at a time
# One (offset, odd multiplier) per round, 31 bits each.
Keys = tuple[tuple[int, int], ...]
_ROUNDS = 8
_BITS = 31
_MASK = (1 << _BITS) - 1
# Odd, and its bits look random; the rounds' own multipliers do most of the mixing.
_SPREAD = 0x2C9277B5
# Up to this size a table is faster than arithmetic, and as uniform as a shuffle can be.
_TABLE = 1 << 16


@attrs.frozen(eq=False)
class EpochOrder:
    """The rows of one epoch in order, with random access."""

    length: int  # how many rows the epoch has
    # int64 indices, 1-D → what the dataset is asked for at each of them.
    take: Callable[[Tensor], list[Any]]
    shuffled: bool = True  # whether another epoch has another order

    def head(self) -> Iterator[Any]:
        """The units of the epoch from its start."""
        places = torch.arange(min(HEAD, self.length), device="cpu")
        return iter(self.take(places))


@attrs.frozen(eq=False)
class BlockSampler:
    """Random order in which blocks of consecutive rows are visited one after the other."""

    rows: int  # of the dataset
    block: int  # rows of one

    def __len__(self) -> int:
        return self.rows

    def __iter__(self) -> Iterator[int]:
        order = permutation_in_blocks(self.rows, self.block, 0, 0)
        return iter(order(torch.arange(self.rows, device="cpu")).tolist())


def find_order(sampler: Any, seed: int, epoch: int) -> EpochOrder | None:
    """The order of one of torch's own samplers; None for any other sampler."""
    finder = _FINDERS.get(type(sampler))
    return None if finder is None else finder(sampler, seed, epoch)


def sampler_length(sampler: Any) -> int | None:
    """How many units a sampler yields; None if it has no length."""
    try:
        return len(sampler)
    except TypeError:
        return None


def refuse_split(dataset: Any, sampler: Any) -> None:
    """Refuse a loader that is known to give each rank its own rows.

    Samplers that are modeled on torch's DistributedSampler have its attributes `num_replicas` and
    `rank`; a stream of Hugging Face that `split_dataset_by_node` split, `_distributed`.

    Raises:
        DataError: the loader has such a sampler or dataset.
    """
    for part in _sampler_chain(sampler):
        ranks = getattr(part, "num_replicas", None)
        splits = isinstance(ranks, int) and ranks > 1 and hasattr(part, "rank")
        if splits or isinstance(part, DistributedSampler):
            raise DataError(
                f"This loader has a {type(part).__name__}, which already gives each rank its rows. "
                f"Pass the loader without it (shuffle=True replaces it), or keep it and set "
                f'fx.Plan(data=fx.Data(source="sharded")).'
            )
    if getattr(getattr(dataset, "_distributed", None), "world_size", 1) > 1:
        raise DataError(
            f"This loader has a {type(dataset).__name__} that split_dataset_by_node split, so that "
            f"each rank has its own rows. Pass the dataset before it was split, or keep it and set "
            f'fx.Plan(data=fx.Data(source="sharded")).'
        )


class BorrowedGenerators:
    """Separate generators for code that draws from the global ones.

    Code inside `with borrowed():` continues from the state in which the last such block ended.
    Outside, the process's generators are unaffected by it.

    Args:
        key: Initial seed, from 0 to 2**63 - 1.
    """

    def __init__(self, key: int) -> None:
        self._key = key
        # The states of torch's and Python's generators inside, and those with which it began.
        self._inside: tuple[Any, Any] | None = None
        self._start: tuple[Any, Any] | None = None
        # NumPy's generator inside, and the state with which it began. It replaces that of the
        # process: copying its state back and forth takes longer than reading a batch may.
        self._numpy: Any = None
        self._numpy_start = ""

    @contextmanager
    def __call__(self) -> Iterator[None]:
        outside, numpy = _states(), sys.modules.get("numpy")
        of_numpy = None if numpy is None else numpy.random.get_bit_generator()
        try:
            self._enter(numpy)
            yield
        finally:
            self._inside = _states()
            _set_states(outside)
            if numpy is not None:
                self._numpy = numpy.random.get_bit_generator()
                numpy.random.set_bit_generator(of_numpy)

    def _enter(self, numpy: Any) -> None:
        if numpy is not None:
            numpy.random.set_bit_generator(self._numpy or numpy.random.MT19937(0))
        if numpy is not None and self._numpy is None:
            numpy.random.seed([self._key & 0xFFFFFFFF, self._key >> 32])  # as `seed_host` does
            self._numpy_start = canonical_text(numpy.random.get_bit_generator().state)
        if self._inside is None:
            random.seed(self._key)
            torch.default_generator.manual_seed(self._key)
            self._start = _states()
        else:
            _set_states(self._inside)

    @property
    def used(self) -> bool:
        """Whether any number has been drawn so far."""
        if self._start is None or self._inside is None:
            return False
        (torch_0, python_0), (torch_1, python_1) = self._start, self._inside
        numpy = "" if self._numpy is None else canonical_text(self._numpy.state)
        return not (torch_0.equal(torch_1) and python_0 == python_1 and numpy == self._numpy_start)


def _states() -> tuple[Any, Any]:
    """The states of torch's CPU and Python's generators."""
    return torch.default_generator.get_state(), random.getstate()


def _set_states(states: tuple[Any, Any]) -> None:
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])


class CustomOrder:
    """What a custom sampler yields in one epoch.

    It runs with its own generators, seeded from (seed, epoch), so that all ranks see the same
    order. It may also use `set_epoch(epoch)` and a `generator` attribute.
    """

    def __init__(self, sampler: Any, seed: int, epoch: int) -> None:
        self._sampler, self._epoch = sampler, epoch
        self._key = hash_key(seed, epoch)
        self._borrowed = BorrowedGenerators(self._key)
        with self._borrowed():
            self._has_epoch = _set_epoch(self._sampler, self._epoch, self._key)
            self._units = (unit for unit in sampler)  # none after the end
        # The first units are read now, since the text of the order is made of them.
        self.length, self._head = sampler_length(sampler), self._pull()

    def __iter__(self) -> Iterator[Any]:
        yield from self._head
        while block := self._pull():
            yield from block

    def head(self) -> Iterator[Any]:
        """The units of the epoch from its start."""
        return iter(self._head)

    @property
    def shuffled(self) -> bool:
        """Whether another epoch may have another order, as far as is known so far."""
        return self._has_epoch or self._borrowed.used

    def _pull(self) -> list[Any]:
        with self._borrowed():
            return list(itertools.islice(self._units, _SAMPLER_CHUNK))


def set_epoch_of(sampler: Any, seed: int, epoch: int) -> None:
    """Call `set_epoch` of a custom sampler, whose length may depend on the epoch."""
    if type(sampler) not in _FINDERS:
        key = hash_key(seed, epoch)
        with BorrowedGenerators(key)():
            _set_epoch(sampler, epoch, key)


def _set_epoch(sampler: Any, epoch: int, key: int) -> bool:
    """Call `set_epoch` of a sampler and of those it wraps; whether that changes the order."""
    shuffles = False
    for part in _sampler_chain(sampler):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
            # torch's DistributedSampler, and samplers modeled on it, have this attribute.
            shuffles = shuffles or getattr(part, "shuffle", True) is not False
        if isinstance(getattr(part, "generator", None), torch.Generator):
            part.generator.manual_seed(key)
            shuffles = True
    return shuffles


def _sampler_chain(sampler: Any) -> Iterator[Any]:
    """A sampler, the one that it wraps, and so on."""
    for _ in range(8):  # samplers that wrap each other would never end
        if sampler is None:
            return
        yield sampler
        sampler = getattr(sampler, "sampler", None)


def _sequential(sampler: SequentialSampler, seed: int, epoch: int) -> EpochOrder:
    return EpochOrder(len(sampler), Tensor.tolist, shuffled=False)


def _random(sampler: RandomSampler, seed: int, epoch: int) -> EpochOrder:
    # Not from the sampler's generator: here any part of the order is computed without what
    # precedes it, so that a run resumes inside an epoch at once.
    n, count = len(sampler.data_source), sampler.num_samples
    keys = round_keys(seed, epoch)
    if sampler.replacement:
        return EpochOrder(count, lambda places: uniform_below(places, n, keys).tolist())
    if count > n:
        return EpochOrder(count, lambda places: _repeated_permutations(places, n, seed, epoch))
    find = permutation(n, keys)
    return EpochOrder(count, lambda places: find(places).tolist())


def _repeated_permutations(places: Tensor, n: int, seed: int, epoch: int) -> list[int]:
    """More samples than rows: consecutive permutations, each with its own keys."""
    entries, cycles = torch.empty_like(places), places // n
    for cycle in cycles.unique().tolist():
        here = cycles == cycle
        words = (seed, epoch, cycle) if cycle else (seed, epoch)
        entries[here] = permutation(n, round_keys(*words))(places[here] % n)
    return entries.tolist()


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
    # As `torch.multinomial` does, which torch's own sampler calls.
    valid = sampler.weights.isfinite() & (sampler.weights >= 0)
    if not valid.all() or not sampler.weights.any():
        raise DataError(
            "iterating: the weights of this WeightedRandomSampler are not all finite and at least "
            "0, or all are 0. A class without rows often gives 1 / 0: leave it out."
        )
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


def hash_key(*words: int | str) -> int:
    """A number below 2**63 from a few words, such as seed, epoch and index."""
    return int.from_bytes(_hash(words, 8), "little") >> 1


def round_keys(*words: int | str) -> Keys:
    """Independent keys from a few words, such as seed and epoch."""
    keys = _hash(words, 8 * _ROUNDS)
    numbers = [int.from_bytes(keys[i : i + 4], "little") & _MASK for i in range(0, len(keys), 4)]
    return tuple((a, b | 1) for a, b in zip(numbers[::2], numbers[1::2], strict=True))


def permutation(n: int, keys: Keys) -> Callable[[Tensor], Tensor]:
    """A keyed permutation of 0..n-1, as a function from index to number.

    A Feistel network over a grid of about sqrt(n) × sqrt(n) cells. A result outside 0..n-1,
    of which there are at most sqrt(n), is permuted again until it falls inside, which keeps it
    a bijection (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        n: Length, from 1 to 2**62.
        keys: From `round_keys`.

    Returns:
        Function of int64 indices in 0..n-1, any shape, to int64 of that shape.
    """
    if n <= _TABLE:
        # Half the rounds: keys for sorting need not be a good permutation themselves.
        places = torch.arange(n, device="cpu")
        table = _network(places, _MASK + 1, _MASK + 1, keys[: _ROUNDS // 2]).sort().indices
        return lambda place: table[place]
    columns = math.isqrt(n - 1) + 1
    rows = -(-n // columns)

    def find(place: Tensor) -> Tensor:
        flat = _network(place.reshape(-1), rows, columns, keys)
        outside = (flat >= n).nonzero().view(-1)
        while len(outside):
            again = _network(flat[outside], rows, columns, keys)
            flat[outside] = again
            outside = outside[again >= n]
        return flat.view(place.shape)

    return find


def permutation_in_blocks(n: int, block: int, *words: int | str) -> Callable[[Tensor], Tensor]:
    """A permutation of 0..n-1 that visits blocks of consecutive numbers one after the other.

    The blocks are permuted, and the numbers within each. The last block may be shorter.

    Args:
        n: Length, from 1 to 2**62.
        block: Numbers in a block; with n or more, this is `permutation`.
        words: Such as seed and epoch.

    Returns:
        As `permutation` does.
    """
    if block >= n:
        return permutation(n, round_keys(*words))
    count = -(-n // block)
    order = permutation(count, round_keys(*words, "blocks"))
    numbers = torch.arange(count, device="cpu")
    short = int((order(numbers) == count - 1).nonzero())
    missing = count * block - n

    @functools.lru_cache(maxsize=2)
    def inside(number: int) -> Callable[[Tensor], Tensor]:
        size = block - missing if number == count - 1 else block
        return permutation(size, round_keys(*words, number))

    def find(place: Tensor) -> Tensor:
        flat = place.reshape(-1)
        # As if the short block had the missing numbers too, at its end.
        flat = flat + missing * (flat >= (short + 1) * block - missing)
        entries = torch.empty_like(flat)
        turns = flat // block
        for turn in turns.unique().tolist():
            number = int(order(torch.tensor([turn], device="cpu")))
            here = turns == turn
            entries[here] = inside(number)(flat[here] - turn * block) + number * block
        return entries.view(place.shape)

    return find


def uniform_below(place: Tensor, n: int, keys: Keys) -> Tensor:
    """An independent uniform number below n for every index; indices below 2**62."""
    # 62 bits modulo n: the bias is below n / 2**62.
    return _network(place, _MASK + 1, _MASK + 1, keys) % n


def uniform(place: Tensor, keys: Keys) -> Tensor:
    """An independent uniform float64 in [0, 1) for every index; indices below 2**62."""
    # 53 bits fill a float64.
    return (_network(place, _MASK + 1, _MASK + 1, keys) >> 9).double() * 2.0**-53


def _hash(words: tuple[int | str, ...], size: int) -> bytes:
    return hashlib.blake2b(" ".join(map(str, words)).encode(), digest_size=size).digest()


def _network(place: Tensor, rows: int, columns: int, keys: Keys) -> Tensor:
    """A bijection of the grid 0..rows·columns-1; both sides at most 2**31."""
    row = place // columns
    column = place - row * columns
    for number, key in enumerate(keys):
        if number % 2 == 0:
            row = _wrapped(row.add_(_noise(column, key, rows)), rows)
        else:
            column = _wrapped(column.add_(_noise(row, key, columns)), columns)
    return row.mul_(columns).add_(column)


def _wrapped(x: Tensor, size: int) -> Tensor:
    """x modulo `size`, in place; x below twice that."""
    return x.bitwise_and_(_MASK) if size == _MASK + 1 else x.sub_((x >= size) * size)


def _noise(x: Tensor, key: tuple[int, int], size: int) -> Tensor:
    """A keyed number below `size` for each x below 2**31."""
    h = x ^ key[0]
    h *= key[1]
    h >>= 16
    h &= _MASK
    h *= _SPREAD
    h >>= 16
    h &= _MASK
    if size == _MASK + 1:
        return h
    h *= size
    h >>= _BITS
    return h
