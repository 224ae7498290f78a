"""Splitting a loader over the ranks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, overload

import attrs
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler

from fxtrain import _extensions
from fxtrain.data.dataset_uses import DatasetUses
from fxtrain.data.fetch import PlainStream
from fxtrain.data.rank_slices import Batching
from fxtrain.data.sharded_loader import Iteration, Reached, Sharded
from fxtrain.data.sources import (
    StepSource,
    dispatch_source,
    function_source,
    row_source,
    stream_source,
)
from fxtrain.data.to_device import make_splitter
from fxtrain.data.user_loader import read_loader, share_of, with_shareable_batches
from fxtrain.errors import DataError
from fxtrain.ops.plan_agreement import plan_for
from fxtrain.state import DistContext, Plan, Position
from fxtrain.state.context import check_connected

T = TypeVar("T")
K = TypeVar("K")
# What torch's default collate function makes a tensor of, in a row that is a tuple or a dict.
_Column = Tensor | int | float


class _Unknown:
    """A type of rows that no dataset has: only `DataLoader[Any]` is one of them."""


# A `DataLoader` has the type of a row of its dataset, and these what torch collates rows to.
@overload
def shard(
    loader: DataLoader[_Unknown], ctx: DistContext, plan: Plan | None = None
) -> Sharded[Any]: ...
@overload
def shard(
    loader: DataLoader[Tensor], ctx: DistContext, plan: Plan | None = None
) -> Sharded[Tensor]: ...
@overload
def shard(
    loader: DataLoader[tuple[_Column, ...]], ctx: DistContext, plan: Plan | None = None
) -> Sharded[list[Tensor]]: ...
@overload
def shard(
    loader: DataLoader[Mapping[K, _Column]], ctx: DistContext, plan: Plan | None = None
) -> Sharded[dict[K, Tensor]]: ...
@overload
def shard(loader: DataLoader[T], ctx: DistContext, plan: Plan | None = None) -> Sharded[T]: ...
@overload
def shard(
    loader: Callable[[Position], T],
    ctx: DistContext,
    plan: Plan | None = None,
    *,
    batch_size: int,
) -> Sharded[T]: ...
@overload
def shard(
    loader: Iterable[object], ctx: DistContext, plan: Plan | None = None, *, batch_size: int
) -> Sharded[Any]: ...
@overload
def shard(
    loader: Iterable[T], ctx: DistContext, plan: Plan | None = None, *, batch_size: None = None
) -> Sharded[T]: ...
def shard(
    loader: Any, ctx: DistContext, plan: Plan | None = None, *, batch_size: int | None = None
) -> Sharded[Any]:
    """Split a loader, or other data, over the ranks.

    Order, rows and cursor do not depend on the world size: global batch k of W ranks contains
    the next W · batch size rows of the epoch's order, and rank r gets its r-th part. The order is
    a function of the plan's seed and the epoch; a `generator` of the loader is not used.

    Args:
        loader: Any torch DataLoader: map-style or iterable, with any sampler or batch sampler.
            Workers, collate function, pinning and all other settings are kept;
            `drop_last=True` acts as `even="drop"`. Or an iterable, or a dataset, of rows; or,
            without `batch_size`, an iterable of batches that are ready, of which each rank gets
            every W-th. Or a function of a `Position` that returns the `batch_size` rows from
            there on: it is called when they are due, for the index of the rank's first row (with
            `batch="global"`, of the global batch, of which every rank keeps its part), and must
            return the same rows for the same position on every rank. Its epoch has no end.
        ctx: The ranks; data is split over `ctx.axis("data")`, and sequences over the context
            axis where the plan says so.
        plan: `batch`, `even`, `seed`, `accumulate`, `flush`, `data` and `context` are used; by
            default the plan of the launch, or else `fx.Plan()`.
        batch_size: Rows of a batch, per rank or of all ranks, as the plan says; a DataLoader has
            its own.

    Effects:
        None here, except one broadcast with `Data(source="dispatch")`, and that a dataset with
        `state_dict` is asked for its state. Iterating starts the loader's workers and, once per
        epoch, when the first batch is read, compares the plans and the order of the data;
        dispatched and already sharded data exchange one message per global batch.

    Raises:
        DataError: the loader, or its batch size, cannot be split as requested, or is split by rank
            already; on every rank. While iterating: a position inside an epoch of another order; a
            sequence not divisible by the context ranks, on all of those.
        PlanError: the ranks pass different plans; on every rank, when iterating starts or, with
            `Data(source="dispatch")`, here.
        CollectiveError: the ranks differ in rows, order, batching or position, or one of them
            cannot read its first batch; likewise.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     for batch in fx.shard(DataLoader(torch.arange(3), batch_size=2), ctx):
        ...         batch.data.tolist(), batch.position.index
        ([0, 1], 2)
        ([2], 3)
        >>> def squares(position):
        ...     return (position.index + torch.arange(2)) ** 2
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     loader = fx.shard(squares, ctx, batch_size=2)
        ...     [batch.data.tolist() for batch in loader.updates(3)]
        [[0, 1], [4, 9], [16, 25]]
    """
    _check_types(loader, ctx, plan)
    plan = plan_for("shard", ctx, plan)
    return _shard(_as_loader(loader, batch_size, plan), ctx, plan)


class _RowFunction(NamedTuple):
    """A function of a position, in the place of a loader."""

    dataset: Callable[[Position], Any]  # the function
    batch_size: int  # rows that it returns


def _as_loader(source: Any, batch_size: int | None, plan: Plan) -> Any:
    """A loader of data that comes without one."""
    if isinstance(source, DataLoader):
        if batch_size is not None:
            raise DataError(
                f"shard(batch_size={batch_size!r}): this DataLoader has a batch size of its own. "
                f"Use DataLoader(dataset, batch_size={batch_size!r})."
            )
        return source
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise DataError(f"shard(batch_size={batch_size!r}): pass a number of rows, 1 or more.")
    if not isinstance(source, Iterable | Dataset):
        if batch_size is None:
            raise DataError(
                "shard: a function of a position needs the number of rows that it returns. Use "
                "fx.shard(get_rows, ctx, plan, batch_size=32)."
            )
        if plan.data.source == "sharded":
            raise DataError(
                'shard: a function of a position with Data(source="sharded"): it makes the rows of '
                "all ranks, for the position of each. To make batches of what each rank has, use "
                "fx.batch(data, ctx, plan, after=position)."
            )
        return _RowFunction(source, batch_size)
    if isinstance(source, IterableDataset):
        return DataLoader(source, batch_size=batch_size)
    if batch_size is None and isinstance(source, Tensor | Dataset):
        raise DataError(
            f"shard: a {type(source).__name__} of rows needs a batch size. Use "
            f"fx.shard(DataLoader(dataset, batch_size=32, shuffle=True), ctx, plan), or "
            f"fx.shard(rows, ctx, plan, batch_size=32) for the rows in their order."
        )
    if batch_size is not None and hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        rows: Any = source
        return DataLoader(rows, batch_size=batch_size)
    return DataLoader(PlainStream(source), batch_size=batch_size)


def every_row(
    loader: Sharded[T] | DataLoader[T], ctx: DistContext, plan: Plan, *, ends: bool = False
) -> Sharded[T]:
    """A loader that yields every row of the data once, without padding: for metrics.

    A rank without a row in a global batch gets a stand-in of size 0, as under `even="uneven"`.

    Args:
        loader: A sharded loader, whose own plan and position count, or a torch DataLoader.
        plan: For a torch DataLoader.
        ends: Whether the caller ends the iteration over data without an end.

    Raises:
        DataError: the loader cannot be split, drops the last batch, or has no end.
    """
    sharded = isinstance(loader, Sharded)
    given, plan = (loader._loader, loader.plan) if sharded else (loader, plan)
    if not isinstance(given, DataLoader | _RowFunction):
        raise DataError(
            f"evaluate takes a loader from fx.shard or a torch DataLoader, found "
            f"{type(given).__name__}. For example: fx.evaluate(ctx, model, "
            f"DataLoader(dataset, batch_size=64), fn)."
        )
    if isinstance(given, DataLoader) and not sharded and plan.batch == "global":
        given = with_shareable_batches(given, ctx.axis("data").world_size)
    every = _shard(given, ctx, attrs.evolve(plan, even="uneven"))
    if every._source.endless and not ends:
        raise DataError(
            "evaluate: an epoch of this loader has no end. Pass batches=, the number of batches to "
            'read, a loader of the rows to evaluate, or a blend with Blend(ends="stop").'
        )
    if every._batching.even == "drop":
        raise DataError(
            "evaluate: a metric is computed over every row of the data, and this loader leaves "
            "rows out (drop_last=True). Use DataLoader(..., drop_last=False)."
        )
    return _at_the_same_row(every, loader) if sharded else every


def share_of_replica(loader: Sharded[T], plan: Plan, part: int, parts: int) -> Sharded[T]:
    """The same data, of which contexts like the loader's each read a part, without a group.

    Args:
        plan: In place of the loader's.
        part: Which of the contexts this is, from 0: it has the data ranks from `part * ranks` on.
        parts: Number of contexts.

    Raises:
        DataError: a rank reads the data for all, or they have to be resumed by a state.
    """
    if plan.data.source != "shard" or loader._source.stateful:
        raise DataError(
            f"Replicas that die and join read their rows independently, from a position: they "
            f"support neither Data(source={plan.data.source!r}) other than 'shard' nor streams and "
            f"blends that are resumed by loader.state()."
        )
    data = loader.ctx
    rank, world_size = part * data.world_size + data.rank, parts * data.world_size
    uses, ranks = data.comm.slot(DatasetUses), range(rank, rank + 1)
    source, batching = _source(loader._loader, world_size, plan, ranks, uses)
    return Sharded(
        ctx=attrs.evolve(data, rank=rank, world_size=world_size),
        plan=plan,
        source=source,
        batching=batching,
        loader=loader._loader,
        alone=True,
    )


def in_windows(loader: Sharded[T], ctx: DistContext, plan: Plan) -> Sharded[T]:
    """The loader with the accumulation windows of a model's plan, where its own differ."""
    own = loader.plan
    if (own.accumulate, own.flush) == (plan.accumulate, plan.flush):
        return loader
    plan = attrs.evolve(own, accumulate=plan.accumulate, flush=plan.flush)
    return _at_the_same_row(_shard(loader._loader, ctx, plan), loader)


def layout_of(loader: Sharded, epoch: int) -> dict[str, Any]:
    """What a checkpoint records of the data of an epoch: plain values, equal on every rank."""
    batching, order = loader._batching, loader._sampler_name()
    if order != SequentialSampler.__name__:
        order += f" with seed {loader.plan.seed}"
    if loader.plan.data.source == "sharded":
        order += ", sharded already"
    return {
        "units": loader._source.length(epoch),
        "unit": batching.unit,
        "order": order,
        "batch": batching.stride,
        "even": batching.even,
    }


def _at_the_same_row(loader: Sharded[T], other: Sharded[T]) -> Sharded[T]:
    cursor = other._trail.cursor()
    trail = Iteration(cursor.position.epoch, cursor)
    return attrs.evolve(loader, trail=trail, reached=Reached(cursor))


def _shard(loader: Any, ctx: DistContext, plan: Plan) -> Sharded:
    data, uses = ctx.axis("data"), ctx.comm.slot(DatasetUses)
    everyone = range(data.world_size)
    if plan.data.source == "dispatch" and data.world_size > 1:
        source, batching = dispatch_source(
            lambda: _source(loader, data.world_size, plan, everyone, uses), data, plan
        )
    elif plan.data.source == "sharded":
        source, batching = _extensions.presharded_source(loader, data, plan, uses)
    else:
        ranks = everyone[data.rank : data.rank + 1]
        source, batching = _source(loader, data.world_size, plan, ranks, uses)
    cut = None if plan.context is None else make_splitter(ctx, plan)
    return Sharded(ctx=data, plan=plan, source=source, batching=batching, loader=loader, cut=cut)


def _source(
    loader: Any, world_size: int, plan: Plan, ranks: range, uses: DatasetUses
) -> tuple[StepSource, Batching]:
    """A loader read for some of the ranks."""
    if isinstance(loader, _RowFunction):
        size = loader.batch_size
        size = share_of(size, world_size) if plan.batch == "global" else size
        batching = Batching(per_rank=size, ranks=world_size, even=plan.even)
        return function_source(loader.dataset, batching, plan, ranks), batching
    batching, sampler = read_loader(loader, world_size, plan)
    if isinstance(loader.dataset, IterableDataset):
        return stream_source(loader, batching, plan, ranks, uses), batching
    return row_source(loader, sampler, batching, plan, ranks, uses), batching


def _check_types(loader: Any, ctx: Any, plan: Any) -> None:
    if isinstance(loader, Sharded):
        raise DataError("shard: this loader is sharded already. Pass the DataLoader itself.")
    if isinstance(loader, str | bytes | Mapping) or not (
        isinstance(loader, DataLoader | Dataset | Iterable) or callable(loader)
    ):
        raise DataError(
            f"shard takes a torch DataLoader, an iterable or a function of a position, found "
            f"{type(loader).__name__}. For example: "
            f"fx.shard(DataLoader(dataset, batch_size=32, shuffle=True), ctx, plan)."
        )
    check_connected("shard", ctx)
    if plan is not None and not isinstance(plan, Plan):
        raise DataError(
            f"shard: plan is a {type(plan).__name__}, not an fx.Plan. For example: "
            f"fx.shard(loader, ctx, fx.Plan(seed=7))."
        )
