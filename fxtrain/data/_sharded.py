"""The sharded loader that users hold."""

import warnings
from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from fxtrain import _tree, ops
from fxtrain._errors import DataError
from fxtrain.data._order import order_of
from fxtrain.data._slices import Layout, Mark, advance, next_epoch
from fxtrain.data._source import (
    Source,
    dispatched,
    map_source,
    presharded,
    stream_source,
)
from fxtrain.data._stream import Cut
from fxtrain.state import Batch, DistContext, Plan, Position

__all__ = ["Sharded", "shard"]


@attrs.define(eq=False)
class _Trail:
    """How far iteration got: like any iterator, a pass over the data has a state."""

    passes: int = 0
    reached: Position | None = None


@attrs.frozen(kw_only=True, eq=False)
class Sharded:
    """A loader that gives this rank its part of every global batch.

    Identity decides equality and hash: the loader inside is torch's.

    Attributes:
        position: The cursor at which iteration starts.
        ctx: The data axis of the context.
        plan: The plan that it follows.
    """

    position: Position
    ctx: DistContext
    plan: Plan
    _source: Source = attrs.field(repr=False, alias="source")
    _layout: Layout | None = attrs.field(repr=False, alias="layout")
    _trail: _Trail = attrs.field(factory=_Trail, repr=False, alias="trail")

    def epochs(self, n: int) -> Iterator["Sharded"]:
        """One loader per epoch, from where this one stands up to epoch n of the run.

        Example:
            >>> import fxtrain as fx, torch
            >>> from torch.utils.data import DataLoader
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     loader = fx.shard(DataLoader(torch.arange(4), batch_size=2), ctx)
            ...     [batch.position.updates for epoch in loader.epochs(2) for batch in epoch]
            [1, 2, 3, 4]
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise DataError(f"epochs({n!r}): pass the number of epochs of the run, 0 or more.")
        position = self.position
        if position.is_last:
            position = next_epoch(position)
        while position.epoch < n:
            epoch = self.at(position)
            yield epoch
            position = next_epoch(epoch._end())

    def at(self, position: Position) -> "Sharded":
        """The same loader, going on from a cursor, which may stem from another world size.

        Example:
            >>> import fxtrain as fx, torch
            >>> from torch.utils.data import DataLoader
            >>> with fx.detect(env={}, device="cpu") as ctx:
            ...     loader = fx.shard(DataLoader(torch.arange(4), batch_size=2), ctx)
            ...     first = next(iter(loader))
            ...     [batch.data.tolist() for batch in loader.at(first.position)]
            [[2, 3]]
        """
        if not isinstance(position, Position):
            raise DataError(
                f"at() takes a Position, found {type(position).__name__}. "
                f"Use batch.position or report.position."
            )
        return attrs.evolve(self, position=position, trail=_Trail())

    def __len__(self) -> int:
        if self._source.outline is None:
            raise TypeError(
                "This loader has no length: it reads an iterable or sharded source, whose end "
                "shows only when it comes."
            )
        if self.position.is_last:
            return 0
        _, steps, last = self._source.outline(self.position)
        return steps - (last is not None and last.sizes[self.ctx.rank] == 0)

    def __iter__(self) -> Iterator[Batch]:
        self._trail.passes += 1
        if self._trail.passes == 2 and self._source.shuffled:
            warnings.warn(
                f"This is a second pass over epoch {self.position.epoch}, in the same shuffled "
                f"order. Use `for epoch in loader.epochs(n): for batch in epoch:`.",
                stacklevel=2,
            )
        if not self.position.is_last:
            yield from self._run()

    def _run(self) -> Iterator[Batch]:
        _agree_on_data(self)
        position, rank = self.position, self.ctx.rank
        masks: dict[tuple[int, int], Tensor] = {}
        for cut in self._source.cuts(position):
            position = advance(position, cut.mark, self.plan)
            batch = _batch(self, cut, position, masks)
            self._trail.reached = position
            following = cut.following
            if following is not None and following.sizes[rank] == 0:
                after = advance(position, following, self.plan)
                self._trail.reached = after
                yield attrs.evolve(batch, ghost=_ghost(batch, following, after))
                return
            if cut.data is None:
                raise DataError(
                    f"Rank {rank} of {self.ctx.world_size} has no row in this epoch, under "
                    f'even="uneven". Use fewer ranks, smaller batches, or even="pad".'
                )
            yield batch

    def _end(self) -> Position:
        """Where the epoch ends: where iteration got, or by arithmetic before it ran."""
        if self._trail.reached is not None or self._source.marks is None:
            return self._trail.reached or self.position
        position = self.position
        for mark in self._source.marks(position):
            position = advance(position, mark, self.plan)
        return position


def shard(loader: DataLoader[Any], ctx: DistContext, plan: Plan = Plan()) -> Sharded:  # noqa: B008
    """Split a loader over the ranks.

    Order, rows and cursor do not depend on the world size: step k of W ranks holds the next
    W · batch size rows of the epoch's order, rank r the r-th part of them.

    Args:
        loader: Any torch DataLoader: map-style or iterable, with any sampler or batch sampler.
            Its workers, collate function and pinning are kept; `drop_last=True` acts as
            `even="drop"`.
        ctx: The ranks; data is split over `ctx.axis("data")`.
        plan: `batch`, `even`, `seed`, `accumulate`, `flush` and `data` are read.

    Effects:
        None here. Iterating starts the loader's workers, compares the loaders of all ranks
        once per epoch, and with a dispatched or sharded source exchanges messages per batch.

    Raises:
        DataError: the loader, or its batch size, cannot be split as asked; on every rank.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     for batch in fx.shard(DataLoader(torch.arange(3), batch_size=2), ctx):
        ...         batch.data.tolist(), batch.position.index
        ([0, 1], 2)
        ([2], 3)
    """
    _check_types(loader, ctx, plan)
    data = ctx.axis("data")
    start = Position()
    if plan.data.source == "sharded":
        if plan.even == "uneven":
            raise DataError(
                'even="uneven" with Data(source="sharded"): no rank can see when the data of the '
                'others ends. Use even="pad" or even="drop".'
            )
        source = presharded(loader, data, plan)
        return Sharded(position=start, ctx=data, plan=plan, source=source, layout=None)
    sends = plan.data.source == "dispatch" and data.world_size > 1
    layout = _layout(loader, data.world_size, plan)
    if sends and not data.is_main:
        source = dispatched(Source(lambda _: iter(()), shuffled=False), data)
        return Sharded(position=start, ctx=data, plan=plan, source=source, layout=None)
    ranks = tuple(range(data.world_size)) if sends else (data.rank,)
    if isinstance(loader.dataset, IterableDataset):
        source = stream_source(loader, layout, plan, ranks)
    else:
        source = map_source(loader, order_of(loader, plan.seed), layout, plan, ranks)
    source = dispatched(source, data) if sends else source
    return Sharded(
        position=start, ctx=data, plan=plan, source=source, layout=None if sends else layout
    )


def _layout(loader: DataLoader[Any], ranks: int, plan: Plan) -> Layout:
    even = "drop" if getattr(loader, "drop_last", False) else plan.even
    iterable = isinstance(loader.dataset, IterableDataset)
    batched = not iterable and loader.batch_size is None and loader.batch_sampler is not None
    if not batched and type(loader.batch_sampler) is not None and not iterable:
        even = "drop" if getattr(loader.batch_sampler, "drop_last", False) else even
    if batched and _plain(loader):
        size = loader.batch_sampler.batch_size  # type: ignore[union-attr]
        batched = False
        even = "drop" if loader.batch_sampler.drop_last else even  # type: ignore[union-attr]
    else:
        size = 1 if loader.batch_size is None else loader.batch_size
    if batched:
        shares = plan.batch == "global"
        return Layout(per_rank=1, ranks=ranks, even=even, batched=True, share=shares)
    if plan.batch == "global":
        if size % ranks:
            near = [n * ranks for n in (size // ranks, size // ranks + 1) if n]
            raise DataError(
                f'batch="global": a batch of {size} rows does not divide over {ranks} ranks. '
                f"Use batch_size={' or '.join(map(str, near))}."
            )
        size //= ranks
    return Layout(per_rank=size, ranks=ranks, even=even)


def _plain(loader: DataLoader[Any]) -> bool:
    from torch.utils.data import BatchSampler

    return type(loader.batch_sampler) is BatchSampler


def _agree_on_data(loader: Sharded) -> None:
    """Find out before the first batch whether all ranks are about to iterate the same."""
    if loader._layout is None or loader.ctx.comm.control is None:
        return
    outline = loader._source.outline
    length = None if outline is None else outline(loader.position)[0]
    asked = (length, loader._layout.per_rank, loader._layout.even, loader.plan.seed)
    ops.agree((*asked, loader.position), loader.ctx, name="rows, size, even, seed, position")


def _batch(
    loader: Sharded, cut: Cut, position: Position, masks: dict[tuple[int, int], Tensor]
) -> Batch:
    rank, device = loader.ctx.rank, loader.ctx.device
    mark: Mark = cut.mark
    shape = mark.sizes[rank], mark.rows[rank]
    valid = masks.get(shape)
    if valid is None:
        valid = masks[shape] = (torch.arange(shape[0]) < shape[1]).to(device)
    data = cut.data
    if loader.plan.data.to_device and device.type != "cpu":
        blocking = not loader.plan.data.non_blocking
        data = _tree.map_leaves(
            lambda leaf: (
                leaf.to(device, non_blocking=not blocking) if isinstance(leaf, Tensor) else leaf
            ),
            data,
        )
    return Batch(
        data=data,
        position=position,
        valid=valid,
        rows=mark.rows,
        sizes=mark.sizes,
        window_rows=mark.window_rows,
    )


def _ghost(batch: Batch, mark: Mark, position: Position) -> Batch:
    """The same rows once more, all of them invalid, in a step in which others have some."""
    return attrs.evolve(
        batch,
        position=position,
        valid=torch.zeros_like(batch.valid),
        rows=mark.rows,
        sizes=mark.sizes,
        window_rows=mark.window_rows,
    )


def _check_types(loader: Any, ctx: Any, plan: Any) -> None:
    if isinstance(loader, Sharded):
        raise DataError("shard: this loader is sharded already. Pass the DataLoader itself.")
    if not isinstance(loader, DataLoader):
        raise DataError(
            f"shard takes a torch DataLoader, found {type(loader).__name__}. For example: "
            f"fx.shard(DataLoader(dataset, batch_size=32, shuffle=True), ctx, plan)."
        )
    if not isinstance(ctx, DistContext):
        raise DataError(f"shard: ctx is a {type(ctx).__name__}, not a context from fx.detect().")
    if not isinstance(plan, Plan):
        raise DataError(f"shard: plan is a {type(plan).__name__}, not an fx.Plan.")
