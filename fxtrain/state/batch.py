"""What a sharded loader yields and what a step returns."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, overload

import attrs
from typing_extensions import TypeVar

from fxtrain._display import Displayed, brief, number
from fxtrain.state.plan import Plan
from fxtrain.state.position import Position, position_words

if TYPE_CHECKING:
    import torch

Data_co = TypeVar("Data_co", default=Any, covariant=True)
K = TypeVar("K")
V = TypeVar("V")
W = TypeVar("W")
_Key = TypeVar("_Key", contravariant=True)
_Value = TypeVar("_Value", covariant=True)

_STATIC = {"static": True}


class _Indexed(Protocol[_Key, _Value]):
    """Data with entries, by key or by number."""

    def __getitem__(self, key: _Key, /) -> _Value: ...


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Batch(Displayed, Generic[Data_co]):
    """This rank's part of one global batch; unpacks and indexes like its data.

    A batch whose data is a mapping is a mapping itself: `model(**batch)`.

    Attributes:
        data: The result of the loader's collate function, on the context's device.
        position: The cursor just after this batch.
        valid: Bool, shape (rows on this rank,), on the device of the data: False marks
            padding, which is always at the end.
        rows: Real rows on each rank, by rank; equal on every rank.
        sizes: Rows on each rank including padding, by rank; equal on every rank. 0 for a rank
            without a row in this global batch (`even="uneven"`): its data is a placeholder, so
            that it can take part, and counts for nothing.
        plan: The plan of its loader, which `step` compares with the model's; None if it has none.
        run_updates: Updates of the whole run under that plan, where its loader knows: after
            `loader.epochs(n)` or `loader.updates(n)`.
        part: The index of this micro-batch of the rank's batch, if a pipeline splits it.
        parts: The number of micro-batches.
    """

    data: Data_co
    position: Position = attrs.field(metadata=_STATIC)
    valid: torch.Tensor
    rows: tuple[int, ...] = attrs.field(metadata=_STATIC)
    sizes: tuple[int, ...] = attrs.field(metadata=_STATIC)
    plan: Plan | None = attrs.field(default=None, metadata=_STATIC)
    run_updates: int | None = attrs.field(default=None, metadata=_STATIC)
    part: int = attrs.field(default=0, metadata=_STATIC)
    parts: int = attrs.field(default=1, metadata=_STATIC)

    def __repr__(self) -> str:
        real, padding = sum(self.rows), sum(self.sizes) - sum(self.rows)
        ranks = f" of {len(self.sizes)} ranks" if len(self.sizes) > 1 else ""
        rows = f"{real} rows{ranks}{f' and {padding} of padding' if padding else ''}"
        where = position_words(self.position)
        return f"Batch({brief(self.data)}, {rows} on {self.valid.device}, {where})"

    @overload
    def __getitem__(self: Batch[tuple[V, *tuple[Any, ...]]], key: Literal[0]) -> V: ...
    @overload
    def __getitem__(self: Batch[tuple[Any, V, *tuple[Any, ...]]], key: Literal[1]) -> V: ...
    @overload
    def __getitem__(self: Batch[_Indexed[K, V]], key: K) -> V: ...
    def __getitem__(self, key: Any) -> Any:
        data: Any = self.data
        return data[key]

    def __iter__(self: Batch[Iterable[V]]) -> Iterator[V]:
        return iter(self.data)

    def __len__(self) -> int:
        data: Any = self.data
        return len(data)

    def keys(self: Batch[Mapping[K, V]]) -> KeysView[K]:
        """The keys of the data, so that `model(**batch)` works."""
        return self.data.keys()

    def values(self: Batch[Mapping[K, V]]) -> ValuesView[V]:
        """The values of the data."""
        return self.data.values()

    def items(self: Batch[Mapping[K, V]]) -> ItemsView[K, V]:
        """The (key, value) pairs of the data."""
        return self.data.items()

    @overload
    def get(self: Batch[Mapping[K, V]], key: K) -> V | None: ...
    @overload
    def get(self: Batch[Mapping[K, V]], key: K, default: W) -> V | W: ...
    def get(self: Batch[Mapping[Any, Any]], key: Any, default: Any = None) -> Any:
        """The value of a key of the data, or a default."""
        return self.data.get(key, default)

    def to(
        self, target: torch.device | str | int | torch.dtype, *, non_blocking: bool = False
    ) -> Batch[Data_co]:
        """The same batch on another device, or with its floating-point tensors in another dtype."""
        import torch  # already imported by the batch's creator; records are imported without it

        from fxtrain import _tree

        cast = isinstance(target, torch.dtype)

        def moved(leaf: Any) -> Any:
            stays = not isinstance(leaf, torch.Tensor) or (cast and not leaf.is_floating_point())
            return leaf if stays else leaf.to(target, non_blocking=non_blocking)

        data, valid = _tree.map_leaves(moved, self.data), moved(self.valid)
        return attrs.evolve(self, data=data, valid=valid)


@attrs.frozen(repr=False)
class Weighted(Displayed):
    """A loss that is exact over ranks and micro-batches of different weights.

    The gradient of an update is that of `sum(total) / sum(weight)` over every rank and
    micro-batch of the window.

    Attributes:
        total: Scalar tensor that requires grad: the sum of the losses of the items.
        weight: Number or scalar tensor: how many items (tokens, rows, pixels) it sums.
    """

    total: torch.Tensor = attrs.field(eq=False, repr=number)
    weight: torch.Tensor | float = attrs.field(eq=False, repr=number)


@attrs.frozen(kw_only=True, eq=False, repr=False)
class Report(Displayed):
    """The result of one step. Tensors stay on the device; reading one there synchronizes.

    Attributes:
        loss: Scalar, this rank's micro-batch mean, detached; 0 if it has no row in the batch.
            Reduce it, by weight, for a global figure.
        weight: What the loss averages over: rows, or the weight of a `Weighted`.
        grad_norm: Total norm before clipping, equal on every rank (of the replica, under
            `Plan.local`); None if no update was due or the plan does not clip by norm.
        applied: Whether the optimizers updated the parameters.
        skipped: Whether an update was due and skipped, on every rank, because of
            non-finite values.
        position: The cursor of the batch.
        updates: Updates of the model so far, with those that were skipped. Where the model trains
            on each batch of one loader under its plan, this is `position.updates`.
        aux: The loss function's aux metrics, detached.
        metrics: What `fit` evaluated after this update; None where it evaluated nothing.
    """

    loss: torch.Tensor
    weight: torch.Tensor | float
    grad_norm: torch.Tensor | None = None
    applied: bool
    skipped: bool = False
    position: Position
    updates: int = 0
    aux: Any = None
    metrics: Any = None

    def __repr__(self) -> str:
        parts = [f"loss {number(self.loss)}", f"weight {number(self.weight)}"]
        if self.grad_norm is not None:
            parts.append(f"grad_norm {number(self.grad_norm)}")
        update = "applied" if self.applied else "skipped" if self.skipped else "not due"
        parts += [f"update {update}", f"at {position_words(self.position)}"]
        for name, value in (("aux", self.aux), ("metrics", self.metrics)):
            if value is not None:
                parts.append(f"{name} {brief(value)}")
        return f"Report({', '.join(parts)})"
