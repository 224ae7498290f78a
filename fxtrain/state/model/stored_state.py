"""What a checkpoint stores of a wrapped model, and how it is read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    import torch

__all__ = ["FlatShard", "ModelState", "StateReader"]


@attrs.frozen(kw_only=True, eq=False)
class FlatShard:
    """This rank's part of a tensor that ranks hold in stretches of its elements.

    So engines cut parameters that they flatten. Identity decides equality and hash.

    Attributes:
        shape: Of the whole tensor.
        start: Elements before the part, in the order in which torch lays them out.
        values: The part, live, with one dimension; it may be empty.
    """

    shape: tuple[int, ...]
    start: int
    values: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class ModelState:
    """Everything that a wrapped model needs to go on as if it had not been stopped.

    Tensors are the live ones, not copies. Identity decides equality and hash.

    Attributes:
        tensors: By name, the same names and shapes on every rank that holds them. A DTensor
            or a `FlatShard` is spread over ranks; any other is the same on all.
        own: By name, tensors that differ between ranks.
        values: A tree of plain values and tensors, the same on every rank.
        varies_by_rank: Names of tensors of which rank 0's counts, but which may differ between
            ranks, such as the buffers of replicas. Where they do, each rank's is kept too.
        constant_between_steps: Names of tensors that nothing but a step of `model.optimizers`
            changes, so that they may be copied until then.
    """

    tensors: Mapping[str, torch.Tensor | FlatShard]
    own: Mapping[str, torch.Tensor]
    values: Any
    varies_by_rank: frozenset[str] = frozenset()
    constant_between_steps: frozenset[str] = frozenset()


@attrs.frozen(kw_only=True, eq=False)
class StateReader:
    """A saved `ModelState`, to be read piece by piece. Identity decides equality and hash.

    Attributes:
        shapes: (shape, dtype) of each tensor by name.
        fill: (name, tensor) → None; reads into a tensor, plain or spread, or into a stretch.
        values: As they were saved.
        own: (name, rank) → the tensor of its own that a rank saved, or None.
        ranks: How many saved.
        rank: Which of them this rank is, of `loading_ranks` that load.
        loading_ranks: How many load.
    """

    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    fill: Callable[[str, torch.Tensor | FlatShard], None]
    values: Any
    own: Callable[[str, int], torch.Tensor | None]
    ranks: int
    rank: int
    loading_ranks: int
