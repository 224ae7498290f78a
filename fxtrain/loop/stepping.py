"""One micro-batch: forward, backward and, at the end of a window, the update and its schedulers."""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NoReturn

import attrs
from torch import Tensor, nn
from typing_extensions import TypeVar

from fxtrain import _tree, ops
from fxtrain._record import shown
from fxtrain.errors import StepError
from fxtrain.ops import weighting
from fxtrain.ops.micro_batches import end_micro_batch, micro_batch_of, run_micro_batch
from fxtrain.ops.schedules import waiting_schedulers
from fxtrain.ops.transport.mismatches import name_lost_rank
from fxtrain.ops.transport.pace import Pace
from fxtrain.state import (
    Batch,
    DistContext,
    Position,
    Report,
    Weighted,
    WeightedLoss,
    Wrapped,
)
from fxtrain.state.context import check_connected
from fxtrain.state.wrapped import check_open

M = TypeVar("M", bound=nn.Module, default=Any)
Loss = Tensor | Weighted

LOSS_EXAMPLE = "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"


def _check_model(_: Any, __: Any, model: Any) -> None:
    if isinstance(model, Wrapped):
        return
    raise StepError(
        f"StepFns(model=...) takes a wrapped model, found {type(model).__name__}. Use "
        f"model=fx.wrap(net, ctx, plan, optimizer=...), and fx.Plan(compile=True) in place of "
        f"torch.compile."
    )


def check_loss_function(call: str, function: Any) -> None:
    """Refuse what is not a function of (model, batch), such as `nn.CrossEntropyLoss()`."""
    kind = function if isinstance(function, type) else type(function)
    # A module of torch's, or a class that extends one, and a function beside them.
    of_torch = "torch.nn.modules.loss" in [each.__module__ for each in kind.__mro__]
    if of_torch or getattr(function, "__module__", "") == "torch.nn.functional":
        name = getattr(function, "__name__", kind.__name__)
        raise StepError(
            f"{call} takes a function of (model, batch), and {name} takes outputs and targets. "
            f"For example: {LOSS_EXAMPLE}."
        )
    if not callable(function):
        raise StepError(
            f"{call} takes a function, found {type(function).__name__}. For example: "
            f"{LOSS_EXAMPLE}."
        )


def _compute_loss(loss_fn: Callable[[Any, Any], Any], model: Wrapped, batch: Batch) -> WeightedLoss:
    """What strategies call: the user's loss function, with its result checked and weighted."""
    if model.plan.precision.compute == "fp32":
        out = loss_fn(model, batch)
    else:
        with ops.autocast(model):
            out = loss_fn(model, batch)
    if type(out) is Tensor and out.ndim == 0 and out.requires_grad:
        loss, aux = out, None  # nothing to check or to unpack
    else:
        loss, aux = weighting.loss_and_aux(out)
    weighted = weighting.weigh_loss(loss, aux, batch, model)
    return weighted if model.plan.compile is None else _copied(weighted)


def _timed(
    loss_fn: Callable[[Any, Any], Any], pace: Pace, model: Wrapped
) -> Callable[[Any, Any], Any]:
    """The user's loss; its time is added to the rank's pace if no rank waits for others in it."""
    device = model.ctx.device.type
    apart = not model.strategy.waits_in_forward and model.ctx.mesh.context == 1

    def timed_loss(model: Wrapped, batch: Batch) -> Any:
        pace.begin(device)
        began = pace.now(device)
        out = loss_fn(model, batch)
        if apart:
            pace.add(began, device)
        return out

    return timed_loss


@attrs.frozen
class StepFns(Generic[M]):
    """What a step runs.

    Attributes:
        model: The wrapped model that the step trains.
        loss: (model, batch) → a mean loss over the rows of the batch, or
            `Weighted(total, weight)`; either may come in a pair with aux metrics.
    """

    model: Wrapped[M] = attrs.field(validator=_check_model)
    loss: Callable[[Wrapped[M], Batch[Any]], Loss | tuple[Loss, object]] = attrs.field(
        validator=lambda _, __, loss: check_loss_function("StepFns(loss=...)", loss)
    )


def step(ctx: DistContext, batch: Batch[object], fns: StepFns[M]) -> Report:
    """Train on one micro-batch.

    An update is due when the model has accumulated `Plan.accumulate` micro-batches, and at the end
    of the data (unless `Plan(flush=False)`), whatever the loader and other models do. The gradient
    of an update is that of the mean over all rows (with `Weighted`, over the total weight) of the
    model's window on all ranks. Gradients left in this model by another model's backward
    are dropped; those of an `ops.backward` that `ops.apply` has not ended are kept.

    Args:
        ctx: The context for which the model was wrapped.
        batch: From a loader of `fx.shard`.
        fns: The model and its loss.

    Effects:
        Updates parameters, optimizers, schedulers and gradients in place. Communicates as the
        strategy does; `Weighted` adds one all-reduce of one number per update (two with
        accumulation), `nonfinite` other than "ignore" one exchange of flags, and `verify_replicas`
        one exchange of digests after every so many updates.

    Raises:
        StepError: the loss is not a scalar that requires grad, the model has no optimizer or was
            unwrapped, the loader's plan splits sequences in another way than the model's, the
            loop advanced a scheduler of the model itself, a value is non-finite under
            `nonfinite="raise"`, or replicas differ under `verify_replicas`.
        ContextError: the context is closed.
        CollectiveError: a rank never joins.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(1, 1), ctx,
        ...                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        ...     fns = fx.StepFns(model=model, loss=lambda model, x: model(x.data).square().mean())
        ...     for batch in fx.shard(DataLoader(torch.ones(4, 1), batch_size=2), ctx):
        ...         report = fx.step(ctx, batch, fns)
        ...     report.applied, report.updates
        (True, 2)
    """
    model = fns.model if isinstance(fns, StepFns) else _refuse(fns)
    plan = model.plan
    fits = type(batch) is Batch and batch.plan is plan and model.optimizers
    if not fits or model.status.closed or type(ctx) is not DistContext or ctx.comm.state.closed:
        check_step("step", ctx, batch, model)
    position, window = batch.position, model.window
    pace = ctx.comm.state.slots.get(Pace)
    if model.status.block is not None:
        _check_block(model.status.block.batch, batch, model)
    try:
        loss = fns.loss if pace is None else _timed(fns.loss, pace, model)
        micro_batch = micro_batch_of(batch, model)
        weighted = run_micro_batch(micro_batch, model, partial(_compute_loss, loss))
        outcome = end_micro_batch(micro_batch, model)
    except RuntimeError as error:
        # torch's message says how long it waited.
        name_lost_rank(ctx, ("step", "forward, backward and update"), error)
        raise
    if not window.updates or (position.is_last and model.scheduler is not None):
        _remind(ctx, model, position)
    if pace is not None:
        pace.end(ctx)
    return Report(
        loss=weighted.mean,
        weight=weighted.weight,
        grad_norm=outcome.grad_norm,
        applied=outcome.applied,
        skipped=outcome.due and not outcome.applied,
        position=position,
        updates=window.updates,
        aux=None if weighted.aux is None else _tree.map_tensors(Tensor.detach, weighted.aux),
    )


def _copied(weighted: WeightedLoss) -> WeightedLoss:
    """What a report keeps, apart from outputs of CUDA graphs, whose next call overwrites them."""
    weight, aux = weighted.weight, weighted.aux
    return attrs.evolve(
        weighted,
        mean=weighted.mean.clone(),
        weight=weight.clone() if isinstance(weight, Tensor) else weight,
        aux=None if aux is None else _tree.map_tensors(Tensor.clone, aux),
    )


def update(ctx: DistContext, batch: Batch, model: Wrapped, loss: Tensor | Weighted) -> Report:
    """Train on the loss of one micro-batch, which the loop has computed itself.

    Takes the place of `loss.backward()`, `optimizer.step()`, `scheduler.step()` and
    `optimizer.zero_grad()`. Does what `fx.step` does after its call of the loss function:
    accumulation, reduction, clipping, loss scaling, weights, the policy for non-finite values and
    schedulers follow the plan, and parameters are equal in every bit.

    Under a plan with `precision="bf16"` or `"fp16"`, compute the loss inside
    `fx.ops.autocast(model)`, as `fx.step` does.

    Args:
        ctx: The context for which the model was wrapped.
        batch: The batch from which the loss was computed, from a loader of `fx.shard`.
        model: The wrapped model, called as `model(...)` to compute the loss.
        loss: A mean loss over the rows of the batch, or `Weighted(total, weight)`.

    Effects:
        As `fx.step`.

    Raises:
        StepError: as `fx.step`; the loss is in half precision, since it was computed outside of
            `fx.ops.autocast(model)`; or `loss.backward()` was called before.
        ContextError: the context is closed.
        CollectiveError: a rank never joins.

    Example:
        >>> import fxtrain as fx, torch
        >>> from torch.utils.data import DataLoader
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(1, 1), ctx,
        ...                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        ...     for batch in fx.shard(DataLoader(torch.ones(4, 1), batch_size=2), ctx):
        ...         loss = model(batch.data).square().mean()
        ...         report = fx.update(ctx, batch, model, loss)
        ...     report.applied, report.updates
        (True, 2)
    """
    fits = type(ctx) is DistContext and type(batch) is Batch and isinstance(model, Wrapped)
    fits = fits and batch.plan is model.plan and model.optimizers
    if not fits or model.status.closed or ctx.comm.state.closed:
        check_step("update", ctx, batch, model)
    if model.plan.precision.compute != "fp32":
        weighting.check_dtype("update", loss, model)
    try:
        return step(ctx, batch, StepFns(model, lambda *_: loss))
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise StepError(
            "update: backward has already run on this loss, by loss.backward() or an earlier "
            "fx.update. Remove loss.backward(), which fx.update calls itself, and compute a new "
            "loss for each batch.",
            code="FX502",
        ) from error


def check_step(call: str, ctx: DistContext, batch: Any, model: Wrapped) -> None:
    """Raise what `step` raises before it runs anything."""
    check_connected(call, ctx)
    if not isinstance(batch, Batch):
        raise StepError(
            f"{call} takes a Batch, found {type(batch).__name__}. Use `for batch in loader:`, "
            f"where loader = fx.shard(DataLoader(...), ctx, plan), or fx.batch(data, ctx, plan) "
            f"for data of your own."
        )
    check_open(model, call)
    if batch.plan is not None and batch.plan.context != model.plan.context:
        raise StepError(
            f"{call}: the loader splits sequences in another way than the model: context is "
            f"{shown(model.plan.context)} in fx.wrap and {shown(batch.plan.context)} in fx.shard. "
            f"Pass the same plan to both: fx.wrap(net, ctx, plan, ...) and fx.shard(loader, ctx, "
            f"plan)."
        )
    if not model.optimizers:
        raise StepError(
            f"{call}: this model has no optimizer. Wrap it with one: fx.wrap(net, ctx, plan, "
            f"optimizer=lambda params: torch.optim.AdamW(params)).",
            code="FX504",
        )


def _check_block(known: Batch, batch: Batch, model: Wrapped) -> None:
    """Refuse a step inside a block of `ops.sync` that may have decided otherwise to reduce."""
    if known is not batch and model.plan.accumulate > 1:
        raise StepError(
            f"A step inside `with fx.ops.sync(model):`, which does not know the batch: under "
            f"Plan(accumulate={model.plan.accumulate}) it decides whether gradients are reduced. "
            f"Use `with fx.ops.sync(model, batch):`."
        )


def _refuse(fns: object) -> NoReturn:
    raise StepError(
        f"step takes fx.StepFns, found {type(fns).__name__}. "
        f"Use fx.step(ctx, batch, fx.StepFns(model, loss))."
    )


def _remind(ctx: DistContext, model: Wrapped, position: Position) -> None:
    """Log once that a whole epoch made no update, or that a scheduler received no metric in it."""
    window = model.window
    ended = window.epoch is not None and position.epoch + position.is_last > window.epoch
    if ended and not window.updates:
        window.epoch = None
        ops.log(ctx).warning(
            "%s: no update in a whole epoch. Micro-batches so far: %d, and Plan(accumulate=%d) "
            "makes an update when there are %d. Use a smaller number, or train on more batches.",
            type(model.module).__name__,
            window.micro,
            *[model.plan.accumulate] * 2,
        )
    for scheduler in waiting_schedulers(model) if position.is_last and position.epoch else ():
        if scheduler.last_epoch == 0:
            ops.log(ctx).warning(
                "%s has not been stepped: it needs a metric, which fx.step does not know. After "
                "each epoch, call fx.ops.schedule(metric, model), with a validation loss or "
                "another number as the metric.",
                type(scheduler).__name__,
            )
