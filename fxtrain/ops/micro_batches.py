"""A micro-batch: forward and backward; and what ends it, with the update where one is due.

`fx.step` calls `run_micro_batch` and `end_micro_batch`, `ops.backward` the one and `ops.apply` the
other, so that a loop of parts trains as `fx.step` does, in every bit.
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

    def inside(_: Wrapped, __: bool) -> AbstractContextManager[None]:  # noqa: FBT001
        return nullcontext()

    return attrs.evolve(model, strategy=attrs.evolve(model.strategy, sync=inside))


def closes_window(batch: Batch, model: Wrapped) -> bool:
    """Whether the plan makes an update after this micro-batch, if it is the next one."""
    plan = model.plan
    return model.window.micro + 1 >= plan.accumulate or (batch.position.is_last and plan.flush)


def count_micro_batch(batch: Batch, model: Wrapped) -> None:
    """Add a micro-batch to the window, and note whether it closes it."""
    window = model.window
    window.closes = closes_window(batch, model)
    if not window.closes or window.micro:  # else the window is this batch
        weighting.count_rows(batch, model)


def run_micro_batch(
    batch: Batch,
    model: Wrapped,
    compute_loss: Callable[[Wrapped, Batch], WeightedLoss],
    *,
    counts: bool = True,
) -> WeightedLoss:
    """Forward and backward of a micro-batch.

    Args:
        batch: The batch.
        model: The wrapped model.
        compute_loss: (model, batch) → the loss, weighted.
        counts: Whether it is a new micro-batch, and not another loss of the last one.

    Effects:
        The first micro-batch of a window drops gradients that another model has left.
    """
    window, plan, status = model.window, model.plan, model.status
    window.sizes = batch.sizes
    if not (status.added_grads or window.micro):
        model.strategy.begin(model)
    if counts:
        # As `count_micro_batch`, in a step that adds few calls.
        last = batch.position.is_last and plan.flush
        window.closes = last or window.micro + 1 >= plan.accumulate
        if not window.closes or window.micro:  # else the window is this batch
            weighting.count_rows(batch, model)
    reduce, running = window.closes or plan.sync_each, model
    status.unreduced = not reduce and status.block is None
    if status.block is not None:
        reduce, running = status.block[1], without_sync(model)
    if plan.nonfinite != "ignore":
        keep_buffers(model)  # of a loss that calls the module itself
    weighted = model.strategy.run(running, batch, compute_loss, reduce)
    window.provisional, status.before_call = weighted.provisional, None
    if plan.nonfinite != "ignore":
        window.bad_losses.add_(~torch.isfinite(weighted.mean))
    return weighted


def end_micro_batch(
    batch: Batch,
    model: Wrapped,
    spec: UpdateSpec | None = None,
    *,
    advance: bool = True,
    zero: bool = True,
) -> UpdateResult:
    """The update, where the window closes; then the average and the comparison of replicas.

    Args:
        batch: The last batch of the window.
        model: The wrapped model.
        spec: What to do to gradients in place of what the plan says.
        advance: Whether to advance schedulers.
        zero: Whether to zero gradients.

    Raises:
        StepError: values are non-finite under `nonfinite="raise"`, the loop has advanced a
            scheduler itself, or replicas differ.
    """
    plan, window, outcome = model.plan, model.window, _NOT_DUE
    if window.closes:
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
        outcome = model.strategy.apply(model, spec)
        count_update(model.ctx)
        rows = window.real_rows if window.micro else sum(batch.rows)
        window.end()
        model.status.added_grads, model.status.batch = False, None
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
