"""One tensor of a model, wherever its parts lie."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import torch

__all__ = ["Location", "Part", "Weight"]

# Per dimension, the rows of the whole tensor that are on this rank: neighbours, or by number.
Part = tuple["slice | torch.Tensor", ...]


@attrs.frozen(kw_only=True)
class Location:
    """Where the values of a tensor are in a file: contiguous and little-endian.

    Attributes:
        path: The file.
        start: Offset of its first byte in the file.
        nbytes: Bytes of its values.
        dtype: As they are stored.
        shape: Of the tensor.
    """

    path: Path
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@attrs.frozen(kw_only=True, eq=False)
class Weight:
    """One tensor of a user's module: how to get the whole of it, and how to fill it.

    Identity decides equality and hash.

    Attributes:
        like: The live tensor, plain or spread, or a tensor without values like it where this
            rank holds nothing of it.
        shape: Of the whole.
        dtype: In which the whole is given; that in which the user's module came.
        key: Equal for the names of one tensor, and for nothing else.
        here: Whether this rank holds it or a part of it.
        gather: () → the whole, on every rank; all ranks call it at once. The result may share
            memory with the model.
        fill: (read) → None: sets what this rank holds. `read(part)` gives the values of a part
            of the whole, or with None all of them.
        place: (read, location) → None: as `fill`, where a strategy decides itself what becomes of
            the values: it may leave them in the file in which they are. `location` is None where
            they are in none. `like` may be on the meta device until then.
        together: All ranks have to call `fill` at once.
        stored: It is in the module's state dict.
    """

    like: Any
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: Hashable
    here: bool = True
    gather: Callable[[], torch.Tensor] = attrs.field(repr=False)
    fill: Callable[[Callable[[Part | None], torch.Tensor]], None] = attrs.field(repr=False)
    place: Callable[[Callable[[Part | None], torch.Tensor], Location | None], None] | None = (
        attrs.field(default=None, repr=False)
    )
    together: bool = False
    stored: bool = True
