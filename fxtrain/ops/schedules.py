"""Schedulers: how far an update advances them, and those that follow a metric."""

import numbers
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fxtrain._record import shown
from fxtrain.errors import StepError
from fxtrain.ops.collectives import reduce
from fxtrain.ops.devices import as_scalar
from fxtrain.ops.logs import log
from fxtrain.state import Batch, Wrapped
from fxtrain.state.wrapped import check_open

# The attributes in which schedulers of torch keep the number of steps after which they are done.
_LENGTHS = {
    "CosineAnnealingLR": "T_max",
    "OneCycleLR": "total_steps",
    "PolynomialLR": "total_iters",
}
_TOLERANCE = 0.05  # a last short window, and rows of padding


def schedule(metric: float | Tensor, model: Wrapped) -> None:
    """Step the model's schedulers that follow a metric (`ReduceLROnPlateau`): once per epoch.

    `fx.step` advances all others, but does not know the metric.

    Args:
        metric: One number, such as a validation loss. Ranks whose metrics differ use their mean,
            so that their learning rates stay equal.

    Effects:
        One reduction of a number over the ranks.

    Raises:
        StepError: no scheduler of the model follows a metric, or the metric is not one number.

    Example:
        >>> import fxtrain as fx, torch
        >>> plateau = lambda opt: torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx, scheduler=plateau,
        ...                     optimizer=lambda params: torch.optim.SGD(params, lr=0.5))
        ...     for loss in (1.0, 2.0):
        ...         fx.ops.schedule(loss, model)
        ...     model.optimizer.param_groups[0]["lr"]
        0.05
    """
    check_open(model, "ops.schedule")
    waiting = waiting_schedulers(model)
    if not waiting:
        raise StepError(
            "ops.schedule: this model has no scheduler that follows a metric. Wrap it with one: "
            "fx.wrap(..., scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau); fx.step advances "
            "all others."
        )
    size = metric.numel() if isinstance(metric, Tensor) else isinstance(metric, numbers.Real)
    if size != 1:
        raise StepError(
            f"ops.schedule(metric, model) takes one number, found {shown(metric)}. For example: "
            f"fx.ops.schedule(validation_loss, model)."
        )
    local = as_scalar(metric, model.window.sums)
    mean = reduce(local.reshape(()), model.ctx, op="mean").item()
    for scheduler in waiting:
        scheduler.step(mean)


def waiting_schedulers(model: Wrapped) -> list[ReduceLROnPlateau]:
    """The schedulers of a model that follow a metric."""
    schedulers = model.scheduler
    if isinstance(schedulers, Mapping):
        schedulers = list(schedulers.values())
    every = schedulers if isinstance(schedulers, list | tuple) else [schedulers]
    return [scheduler for scheduler in every if isinstance(scheduler, ReduceLROnPlateau)]


def advance_schedulers(batch: Batch, model: Wrapped, steps: int) -> None:
    """Advance the schedulers, which the loop has left alone since the last update."""
    updates = model.window.updates
    status = model.status
    if status.scheduled_update is None and steps:
        _warn_of_lengths(model, batch, steps)
    if status.scheduled_update == updates - 1:
        for scheduler, count in zip(model.schedulers, status.schedule_counts, strict=True):
            if getattr(scheduler, "last_epoch", 0) > count:
                raise StepError(
                    f"The loop called {type(scheduler).__name__}.step() after update "
                    f"{updates - 1}, and a step of fxtrain advances this scheduler itself, as "
                    f"Plan(schedule={model.plan.schedule!r}) says. Remove the call. For a "
                    f"scheduler that advances once per epoch, use Plan(schedule='epoch')."
                )
    _advance_all(model, steps)


def end_epoch(batch: Batch, model: Wrapped) -> None:
    """Advance the schedulers at the end of an epoch, for `Plan(schedule="epoch")`."""
    if not batch.position.epoch and batch.position.updates:
        _warn_of_lengths(model, batch, 1 / batch.position.updates)
    _advance_all(model, 1)


def _advance_all(model: Wrapped, steps: int) -> None:
    for scheduler in model.schedulers:
        _advance(scheduler, steps, capped=model.plan.schedule == "ranks")
    status = model.status
    status.scheduled_update = model.window.updates
    status.schedule_counts = tuple(getattr(each, "last_epoch", 0) for each in model.schedulers)


def steps_per_update(model: Wrapped, rows: int) -> int:
    """Steps of each scheduler for an update that averages over this many rows."""
    plan = model.plan
    if plan.schedule == "samples":
        return rows
    if plan.schedule == "epoch":
        return 0  # `end_epoch` advances them
    # One batch of the loader before it was sharded is one of a rank; a global one is one of all.
    sharded = plan.schedule == "ranks" and plan.batch == "per_rank"
    return model.ctx.axis("data").world_size if sharded else 1


def _advance(scheduler: Any, steps: int, *, capped: bool) -> None:
    """Step a scheduler; capped: as far as its length, which batches of ranks may exceed."""
    for _ in range(steps):
        if capped and scheduler.last_epoch >= getattr(scheduler, "total_steps", float("inf")):
            return
        scheduler.step()


def _warn_of_lengths(model: Wrapped, batch: Batch, steps: float) -> None:
    """Log schedulers that are done long before the run, or long after it.

    `batch` is the last one of an update, and `steps` those of schedulers for each update, on
    average. Unless the model trains on each batch of its loader, nothing is known.
    """
    updates = batch.run_updates
    if updates is None or batch.position.updates != model.window.updates:
        return
    ranks, steps_of_run = model.ctx.axis("data").world_size, round(updates * steps)
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
        by_epoch = model.plan.schedule == "epoch"
        of = "the number of epochs" if by_epoch else "of loader.total_updates(epochs)"
        cure = f"Build it with {_LENGTHS[name]}={steps_of_run}, {of}"
        if length > steps_of_run and ranks > 1 and model.plan.schedule == "update":
            cure += (
                f"; if it counts the batches of the loader before fx.shard, use "
                f"Plan(schedule='ranks'), which steps it {ranks} times per update"
            )
        log(model.ctx).warning(
            "%s has a length of %d steps, and this run of %d updates makes %d under "
            "Plan(schedule=%r). %s.",
            name,
            length,
            updates,
            steps_of_run,
            model.plan.schedule,
            cure,
        )
