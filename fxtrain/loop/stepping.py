"""One micro-batch: forward, backward and, at the end of a window, the update and its schedulers."""

from collections.abc import Callable
from typing import Any, Generic, NoReturn

import attrs
import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from typing_extensions import TypeVar

from fxtrain import _tree, ops
from fxtrain._display import counted
from fxtrain._record import shown
from fxtrain.backends.core.replica_digests import verify_replicas
from fxtrain.errors import StepError
from fxtrain.loop import weighting
from fxtrain.ops.step_parts import check_loss, waiting_schedulers
from fxtrain.ops.transport.exchange import count_update
from fxtrain.ops.transport.mismatches import name_lost_rank
from fxtrain.ops.transport.pace import Pace
from fxtrain.state import (
    DDP,
    Batch,
    DistContext,
    Position,
    Report,
    Single,
    UpdateResult,
    UpdateSpec,
    Weighted,
    WeightedLoss,
    Wrapped,
)
from fxtrain.state.context import check_connected
from fxtrain.state.wrapped import check_open

M = TypeVar("M", bound=nn.Module, default=Any)
Loss = Tensor | Weighted

_NO_UPDATE = UpdateResult(applied=False)
_HALF = (torch.bfloat16, torch.float16)
# The attributes in which schedulers of torch keep the number of steps after which they are done.
_LENGTHS = {
    "CosineAnnealingLR": "T_max",
    "OneCycleLR": "total_steps",
    "PolynomialLR": "total_iters",
}
_TOLERANCE = 0.05  # a last short window, and rows of padding
LOSS_EXAMPLE = "lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"


def _check_model(_: Any, __: Any, model: Any) -> None:
    if isinstance(model, Wrapped):
        return
    if hasattr(model, "_torchdynamo_orig_callable"):
        raise StepError(
            "StepFns(model=...) takes a wrapped model, found the result of torch.compile(model). "
            "Use fx.Plan(compile=True), and pass the wrapped model."
        )
    raise StepError(
        f"StepFns(model=...) takes a wrapped model, found {type(model).__name__}. "
        f"Use model=fx.wrap(net, ctx, plan, optimizer=...)."
    )


def check_loss_function(call: str, function: Any) -> None:
    """Refuse what is not a function of (model, batch), such as `nn.CrossEntropyLoss()`."""
    kind = function if isinstance(function, type) else type(function)
    if issubclass(kind, _Loss) or getattr(function, "__module__", "") == "torch.nn.functional":
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


def _weighted(
    loss_fn: Callable[[Any, Any], Any],
) -> Callable[[Wrapped, Batch], WeightedLoss]:
    """The loss function that strategies call: the user's, with its result checked and weighted."""

    def compute_loss(model: Wrapped, batch: Batch) -> WeightedLoss:
        if model.plan.precision.compute == "fp32":
            out = loss_fn(model, batch)
        else:
            with ops.autocast(model):
                out = loss_fn(model, batch)
        if type(out) is Tensor and out.ndim == 0 and out.requires_grad:
            loss, aux = out, None  # nothing to check or to unpack
        else:
            loss, aux = loss_and_aux(out)
        weighted = weighting.weigh_loss(loss, aux, batch, model)
        return weighted if model.plan.compile is None else _copied(weighted)

    return compute_loss


def _timed(
    loss_fn: Callable[[Any, Any], Any], pace: Pace, model: Wrapped
) -> Callable[[Any, Any], Any]:
    """The user's loss; its time is added to the rank's pace if no rank waits for others in it."""
    device = model.ctx.device.type
    apart = isinstance(model.plan.strategy, Single | DDP) and model.ctx.mesh.context == 1

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
    are dropped; those of `ops.backward` are kept.

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
    window.closes = due = window.micro + 1 >= plan.accumulate or (position.is_last and plan.flush)
    outcome = _NO_UPDATE
    try:
        if not (model.status.added_grads or window.micro):
            model.strategy.begin(model)
        if not due or window.micro:  # else the window is this batch
            weighting.count(batch, model)
        loss = fns.loss if pace is None else _timed(fns.loss, pace, model)
        weighted = model.strategy.run(model, batch, _weighted(loss), due or plan.sync_each)
        if plan.nonfinite != "ignore":
            window.bad_losses.add_(~torch.isfinite(weighted.mean))
        if due:
            outcome = _update(ctx, batch, model, weighted)
        if plan.local is not None or plan.verify_replicas:
            _average_or_verify(model, position)
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
        skipped=due and not outcome.applied,
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
        _check_dtype(loss, model)
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


def _check_dtype(loss: Any, model: Wrapped) -> None:
    """Refuse a loss that autocast would have computed in fp32."""
    compute = model.plan.precision.compute
    dtype = getattr(loss.total if isinstance(loss, Weighted) else loss, "dtype", None)
    if dtype in _HALF:
        raise StepError(
            f"update: the loss is {dtype}, since it was computed outside of autocast, under a "
            f"plan with precision={compute!r}. Compute it as fx.step does: `with "
            f"fx.ops.autocast(model): loss = ...`, or from outputs in fp32 (outputs.float(), or "
            f"Plan(precision=fx.Precision(compute={compute!r}, output='fp32'))).",
            code="FX502",
        )


def _refuse(fns: object) -> NoReturn:
    raise StepError(
        f"step takes fx.StepFns, found {type(fns).__name__}. "
        f"Use fx.step(ctx, batch, fx.StepFns(model, loss))."
    )


def _average_or_verify(model: Wrapped, position: Position) -> None:
    """End an averaging round, and compare replicas, if it is time at the model's updates."""
    micro, updates = model.window.micro, model.window.updates
    if model.status.replica is not None:
        model.strategy.average(model, attrs.evolve(position, updates=updates, micro=micro))
    if model.plan.verify_replicas and not (micro or updates % model.plan.verify_replicas):
        verify_replicas(model)


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


def loss_and_aux(out: Any) -> tuple[Any, Any]:
    """What a loss function returned: a loss, checked, and aux metrics."""
    loss, aux = out if type(out) is tuple and len(out) == 2 else (out, None)
    weighted = type(loss) is Weighted
    total: Any = loss.total if weighted else loss
    if hasattr(total, "full_tensor"):  # a loss computed from sharded logits
        total = total.full_tensor()
    check_loss(total)
    if total.ndim:
        total = total.reshape(())  # as torch's backward would
    return attrs.evolve(loss, total=total) if weighted else total, aux


def _update(ctx: DistContext, batch: Batch, model: Wrapped, weighted: WeightedLoss) -> UpdateResult:
    plan, window = model.plan, model.window
    scale = None
    if window.micro or weighted.provisional:
        scale = weighting.close_window(weighted, model)
    problem = None if plan.nonfinite == "ignore" else _nonfinite_problem(ctx, batch, model)
    spec = UpdateSpec(
        scale=scale,
        clip_norm=plan.clip_norm,
        clip_value=plan.clip_value,
        skip=problem is not None,
    )
    outcome = model.strategy.apply(model, spec)
    count_update(ctx)
    model.status.added_grads = False
    rows = window.real_rows if window.micro else sum(batch.rows)
    window.end()
    if problem is not None and plan.nonfinite == "raise":
        raise problem
    if outcome.applied and model.schedulers:
        advance_schedulers(batch, model, steps_per_update(model, rows))
    return outcome


def _nonfinite_problem(ctx: DistContext, batch: Batch, model: Wrapped) -> StepError | None:
    """An error that names the ranks with a non-finite loss or gradient; equal on every rank."""
    bad_grads = not model.strategy.finite(model)
    bad_losses = int(model.window.bad_losses)
    model.window.bad_losses.zero_()
    counts = ops.gather_objects((bad_losses, bad_grads), ctx)
    if not any(losses or grads for losses, grads in counts):
        return None
    lines = [
        f"Non-finite values before update {model.window.updates + 1} "
        f"(epoch {batch.position.epoch}, index {batch.position.index}):",
        *(
            f"  rank {rank}: {counted(losses, 'non-finite loss')}; "
            f"gradients are {'non-finite' if grads else 'finite'}"
            for rank, (losses, grads) in enumerate(counts)
            if losses or grads
        ),
        'Update skipped. Use Plan(nonfinite="skip") to continue without raising.',
    ]
    return StepError("\n".join(lines), code="FX501")


def advance_schedulers(batch: Batch, model: Wrapped, steps: int) -> None:
    """Advance the schedulers, which the loop has left alone since the last update."""
    updates = model.window.updates
    status = model.status
    if status.scheduled_update is None:
        _warn_of_lengths(model, batch, steps)
    if status.scheduled_update == updates - 1:
        for scheduler, count in zip(model.schedulers, status.schedule_counts, strict=True):
            if getattr(scheduler, "last_epoch", 0) > count:
                raise StepError(
                    f"The loop called {type(scheduler).__name__}.step() after update "
                    f"{updates - 1}, and a step of fxtrain advances this scheduler after every "
                    f"update. Remove the call. A scheduler that advances once per epoch is not "
                    f"passed to fx.wrap."
                )
    for scheduler in model.schedulers:
        _advance(scheduler, steps, capped=model.plan.schedule == "ranks")
    status.scheduled_update = updates
    status.schedule_counts = tuple(getattr(each, "last_epoch", 0) for each in model.schedulers)


def steps_per_update(model: Wrapped, rows: int) -> int:
    """Steps of each scheduler for an update that averages over this many rows."""
    plan = model.plan
    if plan.schedule == "samples":
        return rows
    # One batch of the loader before it was sharded is one of a rank; a global one is one of all.
    sharded = plan.schedule == "ranks" and plan.batch == "per_rank"
    return model.ctx.axis("data").world_size if sharded else 1


def _advance(scheduler: Any, steps: int, *, capped: bool) -> None:
    """Step a scheduler; capped: as far as its length, which batches of ranks may exceed."""
    for _ in range(steps):
        if capped and scheduler.last_epoch >= getattr(scheduler, "total_steps", float("inf")):
            return
        scheduler.step()


def _warn_of_lengths(model: Wrapped, batch: Batch, steps: int) -> None:
    """Log schedulers that are done long before the run, or long after it.

    `batch` is the last one of an update, and `steps` those of schedulers for each update. Unless
    the model trains on each batch of its loader, nothing is known.
    """
    updates = batch.run_updates
    if updates is None or batch.position.updates != model.window.updates:
        return
    ranks, steps_of_run = model.ctx.axis("data").world_size, updates * steps
    names = [type(scheduler).__name__ for scheduler in model.schedulers]
    lengths = [
        getattr(scheduler, _LENGTHS.get(name, ""), None)
        for scheduler, name in zip(model.schedulers, names, strict=True)
    ]
    # Schedulers of several optimizers are often alike.
    for name, length in dict.fromkeys(zip(names, lengths, strict=True)):
        if (
            type(length) is not int
            or abs(length - steps_of_run) <= steps + _TOLERANCE * steps_of_run
        ):
            continue
        cure = f"Build it with {_LENGTHS[name]}={steps_of_run}, of loader.total_updates(epochs)"
        if length > steps_of_run and ranks > 1 and model.plan.schedule == "update":
            cure += (
                f"; if it counts the batches of the loader before fx.shard, use "
                f"Plan(schedule='ranks'), which steps it {ranks} times per update"
            )
        ops.log(model.ctx).warning(
            "%s has a length of %d steps, and this run of %d updates makes %d under "
            "Plan(schedule=%r). %s.",
            name,
            length,
            updates,
            steps_of_run,
            model.plan.schedule,
            cure,
        )
