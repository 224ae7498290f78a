"""Random permutations and random numbers computed from an index, without state.

Entry i of a permutation is computed from (keys, i) alone, so any rank can enter an epoch
anywhere, in constant time. All arithmetic stays below 2**62: int64 never overflows.
"""

import functools
import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

# One (offset, odd multiplier) per round, 31 bits each.
Keys = tuple[tuple[int, int], ...]

_ROUNDS = 8
_BITS = 31
_MASK = (1 << _BITS) - 1
# Odd, and its bits look random; the rounds' own multipliers do most of the mixing.
_SPREAD = 0x2C9277B5
# Up to this size a table is faster than arithmetic, and as uniform as a shuffle can be.
_TABLE = 1 << 16


def hash_key(*words: int | str) -> int:
    """A number below 2**63 from a few words, such as seed, epoch and index."""
    return int.from_bytes(_hash(words, 8), "little") >> 1


def round_keys(*words: int | str) -> Keys:
    """Independent keys from a few words, such as seed and epoch."""
    found = _hash(words, 8 * _ROUNDS)
    numbers = [int.from_bytes(found[i : i + 4], "little") & _MASK for i in range(0, len(found), 4)]
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

    Example:
        >>> import torch
        >>> find = permutation(5, round_keys(7, 0))
        >>> sorted(find(torch.arange(5)).tolist())
        [0, 1, 2, 3, 4]
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

    Example:
        >>> find = permutation_in_blocks(7, 3, "seed", 0)
        >>> found = find(torch.arange(7)).tolist()
        >>> sorted(found), sorted(number // 3 for number in found) == [0, 0, 0, 1, 1, 1, 2]
        ([0, 1, 2, 3, 4, 5, 6], True)
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
        found = torch.empty_like(flat)
        turns = flat // block
        for turn in turns.unique().tolist():
            number = int(order(torch.tensor([turn], device="cpu")))
            here = turns == turn
            found[here] = inside(number)(flat[here] - turn * block) + number * block
        return found.view(place.shape)

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
