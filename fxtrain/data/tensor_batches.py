"""Batches of what a loop has at hand: rollouts, outputs of another model, rows that it drew."""

from typing import Any, TypeVar

import torch

from fxtrain import _tree, ops
from fxtrain.data.rank_slices import GlobalBatch, advance, to_epoch
from fxtrain.data.to_device import make_splitter, to_device, valid_mask, with_tensors
from fxtrain.errors import DataError
from fxtrain.ops.plan_agreement import plan_for
from fxtrain.state import Batch, DistContext, Plan, Position
from fxtrain.state.context import check_connected
from fxtrain.state.position import position_words

T = TypeVar("T")


def batch(
    data: T,
    ctx: DistContext,
    plan: Plan | None = None,
    *,
    after: Position | None = None,
    last: bool = False,
) -> Batch[T]:
    """Make a batch, for `fx.step` and `fx.update`, of the rows that each rank has.

    For data that no loader yields: rollouts, outputs of another model, rows that the loop draws.
    The ranks may pass different numbers of rows, and some of them none (tensors of length 0): such
    a rank gets one row of zeros as a placeholder, so that it can run the model, and counts for
    nothing.

    Args:
        data: This rank's rows: a tensor, a NumPy array or any tree that contains one; arrays of
            numbers become tensors. The first dimension of the first one is that of the rows.
        ctx: The ranks; those of `ctx.axis("data")` pass rows of their own, the others of a mesh
            the same rows as their peers.
        plan: That of the model that trains on the batch; by default the plan of the launch, or
            else `fx.Plan()`.
        after: The position that the batch follows: `batch.position` of the previous one, or the
            position of a checkpoint. None begins the run.
        last: Whether the batch ends an epoch. It closes the accumulation window, unless
            `flush=False`, and the next batch begins the next epoch.

    Returns:
        A batch whose `position` counts the rows of all ranks.

    Effects:
        Moves tensors to the device of the context, as a loader does. One exchange of the numbers
        of rows; none at one rank.

    Raises:
        DataError: no rank has a row, a rank's data has no tensor with rows, or the ranks differ in
            `after` or `last`; on every rank.
        ContextError: the context is closed.
        CollectiveError: a rank never joins.

    Example:
        >>> import fxtrain as fx, torch
        >>> position = fx.Position()
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(1, 1), ctx,
        ...                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        ...     for rows in (2, 3):
        ...         batch = fx.batch(torch.ones(rows, 1), ctx, model.plan, after=position)
        ...         report = fx.update(ctx, batch, model, model(batch.data).square().mean())
        ...         position = batch.position
        ...     position.samples, position.updates
        (5, 2)
    """
    check_connected("batch", ctx)
    plan, axis = plan_for("batch", ctx, plan), ctx.axis("data")
    after = Position() if after is None else after
    data = with_tensors(data)
    rows = _rows_of_ranks(_tree.row_count(data), axis, after, last=last)
    size = rows[axis.rank] or 1
    if not rows[axis.rank]:
        data = _tree.map_leaves(_one_row, data)
    data = to_device(data, ctx, plan)
    split = make_splitter(ctx, plan)
    if after.is_last:
        after = to_epoch(after, after.epoch + 1)
    batch = GlobalBatch(after.index, sum(rows), rows, rows, ())
    return Batch(
        data=data if split is None else split(data),
        position=advance(after, batch, plan, is_last=last),
        valid=valid_mask(size, rows[axis.rank], ctx, plan),
        rows=rows,
        sizes=rows,
        plan=plan,
    )


def _rows_of_ranks(
    rows: int | None, ctx: DistContext, after: Position, *, last: bool
) -> tuple[int, ...]:
    """The rows of each rank; every rank raises or none does."""
    local = rows, after, last
    sizes = [local] if ctx.world_size == 1 else ops.gather_objects(local, ctx)
    if any(other[1:] != sizes[0][1:] for other in sizes):
        views = "; ".join(
            f"rank {rank} continues after {position_words(where)}{', last' if ends else ''}"
            for rank, (_, where, ends) in enumerate(sizes)
        )
        raise DataError(
            f"batch: the ranks make different batches: {views}. Pass the same after= and last= on "
            f"every rank."
        )
    counts = [count for count, *_ in sizes]
    without = [rank for rank, count in enumerate(counts) if count is None]
    if without:
        raise DataError(
            f"batch: the data of ranks {without} has no tensor with a first dimension, of which "
            f"rows are counted. Pass at least one tensor; a rank without rows passes "
            f"tensors of length 0."
        )
    if not any(counts):
        raise DataError(
            "batch: no rank has a row, so there is nothing to train on. Skip the batch on every "
            "rank: `if fx.ops.any_rank(len(rows) > 0, ctx): ...`."
        )
    return tuple(count or 0 for count in counts)


def _one_row(leaf: Any) -> Any:
    """A placeholder for a tensor without rows."""
    if isinstance(leaf, torch.Tensor) and leaf.ndim and not len(leaf):
        return leaf.new_zeros((1, *leaf.shape[1:]))
    return leaf
