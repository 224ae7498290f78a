"""The header of a safetensors file: what is where, for files written tensor by tensor."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fxtrain.errors import CheckpointError

METADATA = "__metadata__"
_ALIGNMENT = 64  # bytes; where memory is mapped, some products round differently at other addresses


def aligned_order(sizes: Sequence[int]) -> list[int]:
    """The order in which the tensors of a file have aligned starts, by their sizes in bytes.

    A tensor starts at a multiple of the largest power of two that divides its size, since that
    power divides the sizes of all tensors before it too. Every power divides 0.

    Example:
        >>> aligned_order([4, 64, 0])
        [2, 1, 0]
    """
    keys = [-(size & -size) or -math.inf for size in sizes]
    return sorted(range(len(sizes)), key=keys.__getitem__)


def to_header(
    rows: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[int]]:
    """The first bytes of a file: the length of its header, and the header.

    `rows` has name, dtype in the format's word, shape and bytes of each tensor, in order. The bytes
    are padded so that what follows is aligned. Also returns where each tensor ends, counted from
    the end of the header.
    """
    if sys.byteorder == "big":
        raise CheckpointError("Safetensors files are little-endian; this machine is big-endian.")
    table: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    ends: list[int] = []
    start = 0
    for name, dtype, shape, nbytes in rows:
        stop = start + nbytes
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        ends.append(stop)
        start = stop
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, ends
