"""One tensor of a model, however it is distributed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from fxtrain._display import describe

if TYPE_CHECKING:
    import torch

# Per dimension, the rows of the full tensor that are on this rank: a slice, or indices.
TensorIndex = tuple["slice | torch.Tensor", ...]


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
    """One tensor of a user's module: how to gather its full value, and how to fill it.

    Attributes:
        like: The live tensor, plain or sharded, or a fake tensor like it if this rank has no part
            of it.
        shape: Full shape.
        dtype: The dtype of the full value: that of the user's original module.
        key: Equal for the names of one tensor, and for nothing else.
        here: Whether this rank has it or a part of it.
        gather: () → the full value, on every rank; all ranks call it at once. The result may
            share memory with the model.
        fill: (read) → None: sets this rank's part. `read(part)` returns the values of a part of
            the full tensor, or with None all of them.
        place: (read, location) → None: as `fill`, for strategies that choose where values are kept:
            one may leave them in their file. `location` is None if no file contains them. `like`
            may be on the meta device until then.
        together: Whether all ranks have to call `fill` at once.
        stored: Whether the module's state dict contains it.
    """

    like: Any = attrs.field(repr=describe)
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: Hashable
    here: bool = True
    gather: Callable[[], torch.Tensor] = attrs.field(repr=False)
    fill: Callable[[Callable[[TensorIndex | None], torch.Tensor]], None] = attrs.field(repr=False)
    place: (
        Callable[[Callable[[TensorIndex | None], torch.Tensor], Location | None], None] | None
    ) = attrs.field(default=None, repr=False)
    together: bool = False
    stored: bool = True
