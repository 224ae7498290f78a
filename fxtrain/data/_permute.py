"""A random permutation of any length that needs no memory: entry i is computed from i."""

import hashlib

from torch import Tensor

__all__ = ["draw", "permute", "round_keys"]

# Odd 64-bit constants with good mixing (Steele, Lea and Flood, "Fast splittable
# pseudorandom number generators", 2014), as signed numbers.
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
_ROUNDS = 6


def round_keys(*words: int, count: int = _ROUNDS) -> tuple[int, ...]:
    """Independent signed 64-bit keys from a few numbers, such as seed and epoch."""
    text = " ".join(map(str, words)).encode()
    return tuple(
        int.from_bytes(
            hashlib.blake2b(text, digest_size=8, salt=bytes([i])).digest(), "little", signed=True
        )
        for i in range(count)
    )


def permute(index: Tensor, n: int, keys: tuple[int, ...]) -> Tensor:
    """Where a keyed permutation of 0..n-1 sends each index.

    A Feistel network over an even number of bits that holds n - 1; a result
    outside 0..n-1 is sent on until it falls inside, which keeps it a bijection (Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002).

    Args:
        index: int64, any shape, entries in 0..n-1.
        n: Length of the permutation.
        keys: From `round_keys`.

    Returns:
        int64, shape of `index`.

    Example:
        >>> import torch
        >>> sorted(permute(torch.arange(5), 5, round_keys(7, 0)).tolist())
        [0, 1, 2, 3, 4]
    """
    if n < 2:
        return index.clone()
    # With halves of fewer bits the rounds do not mix: small n would come out uneven.
    half = max(3, ((n - 1).bit_length() + 1) // 2)
    out = _network(index, half, keys)
    outside = out >= n
    while bool(outside.any()):
        out[outside] = _network(out[outside], half, keys)
        outside = out >= n
    return out


def draw(index: Tensor, n: int, keys: tuple[int, ...]) -> Tensor:
    """An independent uniform number below n for each index: sampling with replacement."""
    # 63 bits modulo n: the bias is below n / 2**63.
    return (_mix(_mix(index ^ keys[0]) + keys[1]) & ((1 << 63) - 1)) % n


def _network(index: Tensor, half: int, keys: tuple[int, ...]) -> Tensor:
    mask = (1 << half) - 1
    left, right = index >> half, index & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << half) | right


def _mix(x: Tensor) -> Tensor:
    # Shifts are arithmetic: the top bits are masked so that they are logical.
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
