"""One micro-batch: forward, backward and, where a window closes, the update."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain import _tree, ops
from fxtrain._errors import CollectiveError, StepError
from fxtrain.loop import weighting
from fxtrain.ops.step_parts import check_loss
from fxtrain.ops.transport.exchange import guarded
from fxtrain.state import (
    Batch,
    DistContext,
    Finish,
    Outcome,
    Report,
    Share,
    Weighted,
    Wrapped,
    check_connected,
    check_open,
    is_alone,
)

__all__ = ["StepFns", "step"]

_BAD = 2  # place in the tally


def _a_model(_: Any, __: Any, model: Any) -> None:
    if not isinstance(model, Wrapped):
        raise StepError(
            f"StepFns(model=...) takes a wrapped model, found {type(model).__name__}. "
            f"Use model=fx.wrap(net, ctx, plan, optimizer=...)."
        )


def _a_function(_: Any, __: Any, loss: Any) -> None:
    if not callable(loss):
        raise StepError(
            f"StepFns(loss=...) takes a function, found {type(loss).__name__}. For example: "
            f"loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])."
        )


def _usual_finish(model: Any) -> Finish:
    """What every update of a plan does, unless its window needs a correction."""
    if not isinstance(model, Wrapped):
        return Finish()  # refused by the validators, which run next
    return Finish(clip_norm=model.plan.clip_norm, clip_value=model.plan.clip_value)


def _grader(
    loss_fn: Callable[[Wrapped, Batch], Any], *, alone: bool
) -> Callable[[Wrapped, Batch], Share]:
    """What strategies call for a loss: the user's function, checked and weighed."""

    def grade(model: Wrapped, batch: Batch) -> Share:
        if model.plan.precision.compute == "fp32":
            out = loss_fn(model, batch)
        else:
            with ops.autocast(model):
                out = loss_fn(model, batch)
        loss, aux = _loss_and_aux(out)
        return weighting.share(_scalar(loss), aux, batch, model, alone=alone)

    return grade


@attrs.frozen(kw_only=True)
class StepFns:
    """What a step runs.

    Attributes:
        model: The wrapped model that the step trains.
        loss: (model, batch) → a mean loss over the rows of the batch, or
            `Weighted(total, weight)`; either may come in a pair with aux metrics.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        >>> fns = fx.StepFns(model=model, loss=lambda model, batch: model(batch[0]).mean())
    """

    model: Wrapped = attrs.field(validator=_a_model)
    loss: Callable[[Wrapped, Batch], Any] = attrs.field(validator=_a_function)
    _finish: Finish = attrs.field(
        init=False,
        repr=False,
        eq=False,
        default=attrs.Factory(lambda fns: _usual_finish(fns.model), takes_self=True),
    )
    _grade: Callable[[Wrapped, Batch], Share] = attrs.field(
        init=False,
        repr=False,
        eq=False,
        default=attrs.Factory(lambda fns: _grader(fns.loss, alone=False), takes_self=True),
    )
    _grade_alone: Callable[[Wrapped, Batch], Share] = attrs.field(
        init=False,
        repr=False,
        eq=False,
        default=attrs.Factory(lambda fns: _grader(fns.loss, alone=True), takes_self=True),
    )


def step(ctx: DistContext, batch: Batch, fns: StepFns) -> Report:
    """Train on one micro-batch.

    An update is due when `batch.position.micro` is 0; until then gradients add up. The
    gradient of an update is that of the mean over all rows (or, with `Weighted`, over all
    weight) of the window, on all ranks.

    Args:
        ctx: The context for which the model was wrapped.
        batch: From a loader that `fx.shard` made under the same plan.
        fns: The model and its loss.

    Effects:
        Updates parameters, optimizers, schedulers and gradients in place. Traffic is that of
        the strategy; `Weighted` adds one reduction of a number per update (two with
        accumulation), and `nonfinite` other than "ignore" one exchange of flags.

    Raises:
        StepError: the loss is not a scalar with a gradient, the model has no optimizer or was
            unwrapped, or values are non-finite under `nonfinite="raise"`.
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
        ...     report.applied, report.position.updates
        (True, 2)
    """
    if type(batch) is not Batch:
        raise StepError(
            f"step takes a Batch, found {type(batch).__name__}. Iterate a loader that "
            f"fx.shard(loader, ctx, plan) made."
        )
    model = fns.model
    if model.closed:
        check_open(model, "step")
    if ctx.comm.ledger.closed:
        check_connected("step", ctx)
    if not model.optimizers:
        raise StepError(
            "step: this model has no optimizer. Wrap it with one: fx.wrap(net, ctx, plan, "
            "optimizer=lambda params: torch.optim.AdamW(params))."
        )
    return _micro_batch(ctx, batch, fns, model)


def _micro_batch(ctx: DistContext, batch: Batch, fns: StepFns, model: Wrapped) -> Report:
    plan = model.plan
    due = batch.position.micro == 0
    strategy = model.strategy
    now, local = model.round, plan.local
    alone = now is not None and local is not None and is_alone(local, batch.position)
    by_itself = alone and now is not None and len(now.peers) == 1
    try:
        if plan.schedule == "samples" or weighting.spans(batch, model):
            weighting.count(batch, model, alone=alone)
        grade = fns._grade_alone if alone else fns._grade
        share = strategy.run(model, batch, grade, (due or plan.sync_each) and not by_itself)
        if plan.nonfinite != "ignore":
            model.tally[_BAD] += ~torch.isfinite(share.mean)
        outcome = _update(ctx, batch, fns, share, alone=alone) if due else None
        if now is not None:
            strategy.average(model, batch.position)
    except RuntimeError as error:
        raise _named(ctx, error) from error
    aux = None if share.aux is None else _tree.map_leaves(_detach, share.aux)
    if outcome is None:
        return Report(
            loss=share.mean,
            weight=share.weight,
            applied=False,
            position=batch.position,
            aux=aux,
        )
    return Report(
        loss=share.mean,
        weight=share.weight,
        grad_norm=outcome.grad_norm,
        applied=outcome.applied,
        skipped=not outcome.applied,
        position=batch.position,
        aux=aux,
    )


def _loss_and_aux(out: Any) -> tuple[Any, Any]:
    loss, aux = out if type(out) is tuple and len(out) == 2 else (out, None)
    of = loss.total if type(loss) is Weighted else loss
    whole = getattr(of, "full_tensor", None)  # of a loss on split logits
    if whole is None:
        return loss, aux
    return (whole() if of is loss else attrs.evolve(loss, total=whole())), aux


def _scalar(loss: Any) -> Any:
    """A loss, checked; without the dimensions that torch's backward would drop."""
    total = loss.total if type(loss) is Weighted else loss
    check_loss(total)
    if total.ndim == 0:
        return loss
    total = total.reshape(())
    return attrs.evolve(loss, total=total) if type(loss) is Weighted else total


def _update(ctx: DistContext, batch: Batch, fns: StepFns, share: Share, *, alone: bool) -> Outcome:
    model = fns.model
    plan = model.plan
    scale = weighting.close_window(share, batch, model, alone=alone)
    skip = plan.nonfinite != "ignore" and _nonfinite(ctx, batch, model)
    finish = fns._finish
    hold = alone and weighting.is_empty(batch, model)
    if scale is not None or skip or hold:
        finish = attrs.evolve(finish, scale=scale, skip=skip, hold=hold)
    outcome = model.strategy.apply(model, finish)
    by_rows = plan.schedule == "samples"
    rows = weighting.end_window(model) if by_rows or weighting.spans(batch, model) else 0
    if outcome.applied:
        times = rows if by_rows else 1
        for scheduler in model.schedulers:
            for _ in range(times):
                scheduler.step()
    return outcome


def _nonfinite(ctx: DistContext, batch: Batch, model: Wrapped) -> bool:
    """Whether any rank met a non-finite loss or gradient; the same answer on every rank."""
    bad_grads = not model.strategy.finite(model)
    bad_losses = int(model.tally[_BAD])
    model.tally[_BAD] = 0
    found = ops.gather_objects((bad_losses, bad_grads), ctx)
    if not any(losses or grads for losses, grads in found):
        return False
    if model.plan.nonfinite == "skip":
        return True
    model.strategy.apply(model, Finish(skip=True))
    lines = [
        f"  rank {rank}: {losses} losses, gradients {'too' if grads else 'finite'}"
        for rank, (losses, grads) in enumerate(found)
        if losses or grads
    ]
    raise StepError(
        "\n".join(
            [
                f"Non-finite values before update {batch.position.updates} "
                f"(epoch {batch.position.epoch}, index {batch.position.index}):",
                *lines,
                'The update was left out. Plan(nonfinite="skip") goes on instead.',
            ]
        )
    )


def _named(ctx: DistContext, error: RuntimeError) -> RuntimeError:
    """torch's error about a lost rank in other words; any other error as it is."""
    text = str(error)
    if isinstance(error, CollectiveError | StepError) or not any(
        word in text for word in ("gloo", "NCCL", "Connection closed", "ProcessGroup")
    ):
        return error
    try:
        with guarded(ctx, ("step", "forward, backward and update")):
            raise error
    except CollectiveError as named:
        return named


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
