"""The header of a safetensors file: what is where, for files written tensor by tensor."""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fxtrain.errors import CheckpointError

METADATA = "__metadata__"
_ALIGNMENT = 64  # bytes; where memory is mapped, some products round differently at other addresses


def aligned_first(nbytes: int) -> float:
    """A key for sorting the tensors of a file so that each one's start is aligned.

    A tensor starts at a multiple of the largest power of two that divides its size in bytes, since
    that power divides the sizes of all tensors before it too. Every power divides 0.
    """
    return -(nbytes & -nbytes) or -math.inf


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
