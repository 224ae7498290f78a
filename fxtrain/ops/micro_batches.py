"""A micro-batch: forward and backward; and what ends it, with the update where one is due.

`fx.step` calls `micro_batch_of`, `run_micro_batch` and `end_micro_batch`, `ops.backward` the first
two and `ops.apply` the last one, so that a loop of parts trains as `fx.step` does, in every bit.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import attrs
import torch

from fxtrain._display import counted
from fxtrain.errors import StepError
from fxtrain.ops import weighting
from fxtrain.ops.devices import as_scalar
from fxtrain.ops.objects import gather_objects
from fxtrain.ops.schedules import advance_schedulers, end_epoch, steps_per_update
from fxtrain.ops.transport.exchange import count_update
from fxtrain.state import (
    Batch,
    DistContext,
    MicroBatch,
    Plan,
    Position,
    UpdateResult,
    UpdateSpec,
    WeightedLoss,
    Wrapped,
)
from fxtrain.state.wrapped import keep_buffers, settle_buffers

_NOT_DUE = UpdateResult(applied=False, due=False)
_GRAPH_MODES = ("reduce-overhead", "max-autotune")


def uniform_batch(model: Wrapped) -> Batch:
    """The batch of a loop that has none: one row on each rank, and no end of the data.

    Raises:
        StepError: schedulers of the model advance once per row, or once per epoch.
    """
    if model.plan.schedule in ("samples", "epoch") and model.schedulers:
        raise StepError(
            f"Plan(schedule={model.plan.schedule!r}) advances schedulers by what a batch says: how "
            f"many rows it has, and whether it ends an epoch. Pass it: fx.ops.backward(loss, "
            f"model, batch), with a batch of fx.shard or fx.batch."
        )
    return one_row_each(model)


def one_row_each(model: Wrapped) -> Batch:
    """A batch without data, of one row on each rank."""
    rows = (1,) * model.ctx.axis("data").world_size
    valid = torch.ones(1, dtype=torch.bool, device=model.ctx.device)
    return Batch(data=None, position=Position(), valid=valid, rows=rows, sizes=rows)


def uses_cuda_graphs(ctx: DistContext, plan: Plan) -> bool:
    """Whether torch.compile replays the kernels of a model as CUDA graphs."""
    how = plan.compile
    if how is None or ctx.device.type != "cuda":
        return False
    return how.backend == "cudagraphs" or (how.backend == "inductor" and how.mode in _GRAPH_MODES)


def begin_graphs(model: Wrapped) -> None:
    """Mark the beginning of a step for CUDA graphs, which then overwrite their earlier outputs.

    Otherwise torch takes each call that no backward follows for a step, so that in evaluation a
    block overwrites the output of the block before it. A model that is one graph needs no mark.
    """
    plan = model.plan
    if plan.compile is not None and plan.compile.blocks and uses_cuda_graphs(model.ctx, plan):
        torch.compiler.cudagraph_mark_step_begin()


def without_sync(model: Wrapped) -> Wrapped:
    """The model inside a block of `ops.sync`, which has entered that of the strategy."""

    def inside(_: Wrapped, __: MicroBatch) -> AbstractContextManager[None]:
        return nullcontext()

    return attrs.evolve(model, strategy=attrs.evolve(model.strategy, sync=inside))


def micro_batch_of(batch: Batch, model: Wrapped, *, closes: bool | None = None) -> MicroBatch:
    """What is known of a micro-batch before it runs.

    Args:
        batch: The batch.
        model: The wrapped model.
        closes: Whether the window closes after it. None follows the plan, if it is the next one.
    """
    window, plan, block = model.window, model.plan, model.status.block
    if closes is None:
        last = batch.position.is_last and plan.flush
        closes = last or window.micro + 1 >= plan.accumulate
    has_rows = 0 not in batch.sizes or batch.sizes[model.ctx.axis("data").rank] > 0
    return MicroBatch(
        batch=batch,
        closes=closes,
        reduces=closes or plan.sync_each if block is None else block.reduces,
        has_rows=has_rows,
        nested=block is not None,
        buffers=None if has_rows else model.status.before_call,
    )


def run_micro_batch(
    micro_batch: MicroBatch,
    model: Wrapped,
    compute_loss: Callable[[Wrapped, Batch], WeightedLoss],
    *,
    counts: bool = True,
) -> WeightedLoss:
    """Forward and backward of a micro-batch.

    Args:
        micro_batch: The micro-batch.
        model: The wrapped model.
        compute_loss: (model, batch) → the loss, weighted.
        counts: Whether it is a new micro-batch, and not another loss of the last one.

    Effects:
        The first micro-batch of a window drops gradients that another model has left.
    """
    window, plan, status = model.window, model.plan, model.status
    window.sizes = micro_batch.batch.sizes
    if not (window.added or window.micro):
        model.strategy.begin(model)
    if counts and (window.micro or not micro_batch.closes):  # else the window is this batch
        weighting.count_rows(micro_batch.batch, model)
    window.unreduced = not (micro_batch.reduces or micro_batch.nested)
    if plan.nonfinite != "ignore":
        keep_buffers(model)  # of a loss that calls the module itself
    within = without_sync(model) if micro_batch.nested else model
    status.running = micro_batch
    try:
        weighted = model.strategy.run(within, micro_batch, compute_loss)
    finally:
        status.running = None
    window.provisional, status.before_call = weighted.provisional, None
    if plan.nonfinite != "ignore":
        window.bad_losses.add_(~torch.isfinite(weighted.mean))
    return weighted


def end_micro_batch(
    micro_batch: MicroBatch,
    model: Wrapped,
    spec: UpdateSpec | None = None,
    *,
    advance: bool = True,
    zero: bool = True,
) -> UpdateResult:
    """The update, where the window closes; then the average and the comparison of replicas.

    Args:
        micro_batch: The one that has run last.
        model: The wrapped model.
        spec: What to do to gradients in place of what the plan says.
        advance: Whether to advance schedulers.
        zero: Whether to zero gradients.

    Raises:
        StepError: values are non-finite under `nonfinite="raise"`, the loop has advanced a
            scheduler itself, or replicas differ.
    """
    plan, window, outcome, batch = model.plan, model.window, _NOT_DUE, micro_batch.batch
    if micro_batch.closes:
        scale = weighting.close_window(model) if window.micro or window.provisional else None
        checks = spec is None and plan.nonfinite != "ignore"
        problem = _nonfinite_problem(batch, model) if checks else None
        if spec is None:
            spec = UpdateSpec(
                scale=scale,
                clip_norm=plan.clip_norm,
                clip_value=plan.clip_value,
                skip=problem is not None,
                zero=zero,
            )
        else:
            spec = _with_scale(spec, scale, zero=zero)
        replica = model.status.replica
        if replica is not None and not (window.rows if window.micro else sum(replica.sizes(batch))):
            spec = attrs.evolve(spec, keep_parameters=True)
        outcome = model.strategy.apply(model, spec)
        count_update(model.ctx)
        rows = window.real_rows if window.micro else sum(batch.rows)
        window.end()
        if plan.compile is not None and spec.zero:  # else gradients, which are outputs, stay
            begin_graphs(model)
        if model.status.before_window is not None:
            settle_buffers(model, keep=outcome.applied)
        if problem is not None and plan.nonfinite == "raise":
            raise problem
        if advance and outcome.applied and model.schedulers:
            advance_schedulers(batch, model, steps_per_update(model, rows))
    if plan.schedule == "epoch" and batch.position.is_last and advance and model.schedulers:
        end_epoch(batch, model)
    if plan.local is not None or plan.verify_replicas:
        _average_or_verify(model, batch.position)
    return outcome


def _with_scale(spec: UpdateSpec, scale: float | torch.Tensor | None, *, zero: bool) -> UpdateSpec:
    """What a caller wants done to gradients, after the correction of their window's weight."""
    if scale is not None and spec.scale is not None:
        scale = scale * spec.scale
    elif scale is None:
        scale = spec.scale
    return attrs.evolve(spec, scale=scale, zero=zero and spec.zero)


def _average_or_verify(model: Wrapped, position: Position) -> None:
    """End an averaging round, and compare replicas, if it is time at the model's updates."""
    micro, updates = model.window.micro, model.window.updates
    if model.status.replica is not None and model.strategy.average is not None:
        model.strategy.average(model, attrs.evolve(position, updates=updates, micro=micro))
    every = model.plan.verify_replicas
    if every and model.strategy.verify is not None and not (micro or updates % every):
        model.strategy.verify(model)


def _nonfinite_problem(batch: Batch, model: Wrapped) -> StepError | None:
    """An error that names the ranks with a non-finite loss or gradient; equal on every rank."""
    bad = model.window.bad_losses
    bad_grads = 1 - as_scalar(model.strategy.finite(model), bad)
    # Read together: the host waits for the device once.
    losses, grads = map(int, torch.stack([bad, bad_grads]).tolist())
    bad.zero_()
    counts = gather_objects((losses, bool(grads)), model.ctx)
    if not any(losses or grads for losses, grads in counts):
        return None
    at = batch.position
    where = f" (epoch {at.epoch}, index {at.index})" if at.index else ""
    lines = [
        f"Non-finite values before update {model.window.updates + 1}{where}:",
        *(
            f"  rank {rank}: {counted(losses, 'non-finite loss')}; "
            f"gradients are {'non-finite' if grads else 'finite'}"
            for rank, (losses, grads) in enumerate(counts)
            if losses or grads
        ),
        'Update skipped. Use Plan(nonfinite="skip") to continue without raising.',
    ]
    return StepError("\n".join(lines), code="FX501")
