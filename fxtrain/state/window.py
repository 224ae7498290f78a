"""What changes in a wrapped model, one tensor of it, and what a checkpoint stores of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from fxtrain._display import brief

if TYPE_CHECKING:
    import torch

    from fxtrain.state.keys import Key
    from fxtrain.state.strategy import MicroBatch, Round

# Per dimension, the rows of the full tensor that are on this rank: a slice, or indices.
TensorIndex = tuple["slice | torch.Tensor", ...]


@attrs.define(kw_only=True)
class ModelStatus:
    """The mutable part of the handle of a model, beside the sums of its window.

    Attributes:
        closed: The call because of which the handle cannot be used: `fx.unwrap` or `fx.release`
            for good, or `fx.gathered` until its block ends; empty while it can be used.
        running: The micro-batch whose forward and backward run now, by a step or by `ops.backward`;
            None at other times. Functions that torch calls in them (hooks, autograd functions)
            take no argument of ours: this and `block` are where they find the micro-batch. A
            backward that reaches the model at another time is that of another model.
        block: The micro-batch of the `ops.sync` block that is open; None outside.
        averaged: Whether `ops.apply` has averaged replicas, so that `ops.average` need not.
        before_window: Buffers of the module before the open window, by name, where its plan may
            skip the update; None before the model is called.
        before_call: Those before the micro-batch, where this rank may have no row in it.
        scheduled_update: The number of the last update that stepped the schedulers, or None.
        schedule_counts: What each scheduler had counted then. By these a step notices that the
            loop advanced them as well.
        script_settings: What optimizers and schedulers were built with: the options of each group
            and the state of each scheduler, after its name.
        settings: Plain values by name of those that count: the script's, or those of the checkpoint
            that was restored.
        replica: The averaging state of a replica that trains independently (`Plan.local`); None
            if all ranks make updates together.
        others: Parameters that no optimizer had when the model was wrapped. A new window drops
            their gradients too.
    """

    closed: Literal["", "gathered", "unwrap", "release"] = ""
    running: MicroBatch | None = attrs.field(default=None, repr=False)
    block: MicroBatch | None = attrs.field(default=None, repr=False)
    averaged: bool = False
    before_window: dict[str, torch.Tensor] | None = attrs.field(default=None, repr=False)
    before_call: dict[str, torch.Tensor] | None = attrs.field(default=None, repr=False)
    scheduled_update: int | None = None
    schedule_counts: tuple[int, ...] = ()
    script_settings: list[tuple[str, dict[str, object]]] = attrs.field(factory=list, repr=False)
    settings: dict[str, object] = attrs.field(factory=dict, repr=False)
    replica: Round | None = None
    others: list[torch.nn.Parameter] = attrs.field(factory=list, repr=False)


@attrs.define(kw_only=True, eq=False)
class AccumulationWindow:
    """A model's updates, and sums over its open accumulation window; zero between windows.

    It is mutable: a step changes it in place.

    Attributes:
        sums: On the device, floating-point, shape (4,): the four numbers that follow.
        scale: Factor of the window's `Weighted` losses before backward.
        weight: Sum of the weights of this rank's `Weighted` losses.
        bad_losses: Micro-batches with a non-finite loss.
        bad_grads: Gradients that were non-finite when an engine received them.
        micro: Micro-batches.
        rows: Their rows, including padding.
        full_rows: Rows of a full window.
        real_rows: Rows without padding.
        sizes: Rows of the last micro-batch on each rank, including padding.
        unscaled: Whether gradients are already unscaled (fp16).
        updates: Updates of the model, from the beginning of its training.
        pending: The micro-batch of the last `ops.backward`, until `ops.apply` ends it.
        added: Whether `ops.backward` added gradients, to which the next step adds its own.
        unreduced: Whether gradients are not reduced because the plan makes no update yet.
        provisional: Whether the last loss was scaled by an estimate, as `WeightedLoss` says.
        epoch: The epoch in which the window opened; None once the user has been warned.
    """

    sums: torch.Tensor
    scale: torch.Tensor = attrs.field(init=False, repr=False)
    weight: torch.Tensor = attrs.field(init=False, repr=False)
    bad_losses: torch.Tensor = attrs.field(init=False, repr=False)
    bad_grads: torch.Tensor = attrs.field(init=False, repr=False)
    micro: int = 0
    rows: int = 0
    full_rows: int = 0
    real_rows: int = 0
    sizes: tuple[int, ...] = ()
    unscaled: bool = False
    updates: int = 0
    pending: MicroBatch | None = attrs.field(default=None, repr=False)
    added: bool = False
    unreduced: bool = False
    provisional: bool = False
    epoch: int | None = 0

    def __attrs_post_init__(self) -> None:
        self.scale, self.weight = self.sums[0], self.sums[1]
        self.bad_losses, self.bad_grads = self.sums[2], self.sums[3]

    @property
    def closes(self) -> bool:
        """Whether the micro-batch of the last `ops.backward` ends the window."""
        return self.pending is not None and self.pending.closes

    @property
    def is_open(self) -> bool:
        """Whether there are gradients, or micro-batches, of an update that is not made yet."""
        return self.added or self.micro > 0

    def end(self) -> None:
        """Count an update, and begin a new window."""
        self.updates += 1
        self.micro = self.rows = self.full_rows = self.real_rows = 0
        self.added = self.unreduced = self.provisional = False
        self.pending = None


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
    values: torch.Tensor = attrs.field(repr=brief)


@attrs.frozen(kw_only=True, eq=False)
class ModelState:
    """Everything that a wrapped model needs to resume exactly.

    Tensors are the live ones, not copies.

    Attributes:
        tensors: By key, with the same keys and shapes on every rank that holds them. A
            DTensor or a `FlatShard` is sharded; any other is the same on all ranks.
        own: By key, tensors that belong to this rank only.
        values: A tree of plain values and tensors, the same on every rank. Of a mapping, the entry
            "module" has what submodules keep beside tensors, and "base" the digests of frozen
            weights that are left out, both by name in the state dict of the user's module.
        varies_by_rank: Keys of tensors that may differ between ranks, such as the buffers of
            replicas; rank 0's are restored. If they differ, each rank's is saved too.
    """

    tensors: Mapping[Key, torch.Tensor | FlatShard] = attrs.field(repr=brief)
    own: Mapping[Key, torch.Tensor] = attrs.field(repr=brief)
    values: Any = attrs.field(repr=brief)
    varies_by_rank: frozenset[Key] = frozenset()


@attrs.frozen(kw_only=True, eq=False)
class StateReader:
    """A saved `ModelState`, read one tensor at a time.

    Attributes:
        shapes: (shape, dtype) of each tensor by key.
        fill: (key, tensor) → None; reads into a tensor, plain or sharded, or a `FlatShard`.
        values: The saved values.
        own: (key, rank) → the tensor that belongs to a saved rank, or None.
        ranks: Number of ranks that saved.
        rank: This rank, among the `loading_ranks` that load.
        loading_ranks: Number of ranks that load.
        updates: Updates of the run, for a checkpoint that does not count those of its models.
    """

    shapes: Mapping[Key, tuple[tuple[int, ...], torch.dtype]] = attrs.field(repr=brief)
    fill: Callable[[Key, torch.Tensor | FlatShard], None]
    values: Any = attrs.field(repr=brief)
    own: Callable[[Key, int], torch.Tensor | None]
    ranks: int
    rank: int
    loading_ranks: int
    updates: int = 0


@attrs.frozen(kw_only=True)
class FileTensor:
    """A tensor of a source, or to be written to a file, without its values.

    Attributes:
        name: Its name in the file.
        dtype: As it is stored.
        shape: Its shape.
        path: The file with its values, contiguous and little-endian; None if no file has them so.
        start: Offset of the first byte in that file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path | None = None
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


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
        place: (read, stored) → None: as `fill`, for strategies that choose where values are kept:
            one may leave them in the file of `stored`. `like` may be on the meta device until then.
        together: Whether all ranks have to call `fill` at once.
        stored: Whether the module's state dict contains it.
    """

    like: Any = attrs.field(repr=brief)
    shape: tuple[int, ...]
    dtype: torch.dtype
    key: Hashable
    here: bool = True
    gather: Callable[[], torch.Tensor] = attrs.field(repr=False)
    fill: Callable[[Callable[[TensorIndex | None], torch.Tensor]], None] = attrs.field(repr=False)
    place: Callable[[Callable[[TensorIndex | None], torch.Tensor], FileTensor], None] | None = (
        attrs.field(default=None, repr=False)
    )
    together: bool = False
    stored: bool = True
