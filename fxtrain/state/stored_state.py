"""What a checkpoint stores of a wrapped model, and how it is read again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from fxtrain._display import describe

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True, eq=False)
class FlatShard:
    """This rank's part of a flattened tensor: a range of its elements.

    Engines that flatten parameters shard them so.

    Attributes:
        shape: Shape of the full tensor.
        start: Offset of the first element, in torch's memory order.
        values: The live values, with one dimension; may be empty.
    """

    shape: tuple[int, ...]
    start: int
    values: torch.Tensor = attrs.field(repr=describe)


@attrs.frozen(kw_only=True, eq=False)
class ModelState:
    """Everything that a wrapped model needs to resume exactly.

    Tensors are the live ones, not copies.

    Attributes:
        tensors: By name, with the same names and shapes on every rank that holds them. A
            DTensor or a `FlatShard` is sharded; any other is the same on all ranks.
        own: By name, tensors that belong to this rank only.
        values: A tree of plain values and tensors, the same on every rank.
        varies_by_rank: Names of tensors that may differ between ranks, such as the buffers of
            replicas; rank 0's are restored. If they differ, each rank's is saved too.
    """

    tensors: Mapping[str, torch.Tensor | FlatShard] = attrs.field(repr=describe)
    own: Mapping[str, torch.Tensor] = attrs.field(repr=describe)
    values: Any = attrs.field(repr=describe)
    varies_by_rank: frozenset[str] = frozenset()


@attrs.frozen(kw_only=True, eq=False)
class StateReader:
    """A saved `ModelState`, read one tensor at a time.

    Attributes:
        shapes: (shape, dtype) of each tensor by name.
        fill: (name, tensor) → None; reads into a tensor, plain or sharded, or a `FlatShard`.
        values: The saved values.
        own: (name, rank) → the tensor that belongs to a saved rank, or None.
        ranks: Number of ranks that saved.
        rank: This rank, among the `loading_ranks` that load.
        loading_ranks: Number of ranks that load.
        updates: Updates of the run, for a checkpoint that does not count those of its models.
    """

    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = attrs.field(repr=describe)
    fill: Callable[[str, torch.Tensor | FlatShard], None]
    values: Any = attrs.field(repr=describe)
    own: Callable[[str, int], torch.Tensor | None]
    ranks: int
    rank: int
    loading_ranks: int
    updates: int = 0
