"""The parts of a training step, for loops written by hand.

Each calls the function of the same name of the model's strategy.
"""

import numbers
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fxtrain._record import shown
from fxtrain.errors import StepError
from fxtrain.ops.collectives import reduce
from fxtrain.ops.devices import as_scalar
from fxtrain.ops.transport.exchange import count_update
from fxtrain.ops.transport.mismatches import name_lost_rank
from fxtrain.state import Position, UpdateResult, UpdateSpec, Wrapped
from fxtrain.state.wrapped import check_open

# Of the formats that a plan names.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def sync(model: Wrapped, *, enabled: bool = True) -> AbstractContextManager[None]:
    """A block for forward and backward of a micro-batch, in which gradients are reduced or not.

    Args:
        enabled: Whether to reduce gradients over ranks: False inside an accumulation window, True
            for its last micro-batch.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     with fx.ops.sync(model, enabled=False):
        ...         fx.ops.backward(model(torch.ones(1, 2)).sum(), model)
    """
    check_open(model, "ops.sync")
    return model.strategy.sync(model, enabled)


def autocast(model: Wrapped) -> AbstractContextManager[object]:
    """Run a block under autocast, with the dtype of the model's plan.

    The model's forward does this itself; use it for a loss computed outside.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx, fx.Plan(precision="bf16"))
        ...     with fx.ops.autocast(model):
        ...         (torch.ones(1, 2) @ torch.ones(2, 1)).dtype
        torch.bfloat16
    """
    if not isinstance(model, Wrapped):
        check_open(model, "ops.autocast")
    dtype = model.plan.precision.dtype
    if dtype == "fp32":
        return nullcontext()
    return torch.autocast(model.ctx.device.type, dtype=DTYPES[dtype])


def backward(loss: Tensor, model: Wrapped) -> None:
    """Compute gradients of a scalar loss, under the model's loss scale if it has one.

    Args:
        loss: Scalar with a gradient, already divided by the micro-batches of its window.

    Effects:
        Adds to `.grad`, to which the next `fx.step`, if there is one, adds its own; reduces over
        ranks inside `sync(model)`.

    Raises:
        StepError: the loss is not a scalar or does not require grad.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1, bias=False), ctx)
        ...     fx.ops.backward(model(torch.ones(1, 2)).sum(), model)
        ...     model.module.weight.grad
        tensor([[1., 1.]])
    """
    check_open(model, "ops.backward")
    check_loss(loss)
    model.status.added_grads = model.status.in_backward = True
    try:
        with _lost_ranks_named(model, "backward"):
            model.strategy.backward(loss, model)
    finally:
        model.status.in_backward = False


@contextmanager
def _lost_ranks_named(model: Wrapped, op: str) -> Iterator[None]:
    """Name the ranks that never joined a part of a step, where torch says how long it waited."""
    try:
        yield
    except RuntimeError as error:
        name_lost_rank(model.ctx, (op, ""), error)
        raise


def scale_grads(model: Wrapped, factor: float | Tensor) -> None:
    """Multiply every gradient by a factor, in place.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1, bias=False), ctx)
        ...     fx.ops.backward(model(torch.ones(1, 2)).sum(), model)
        ...     fx.ops.scale_grads(model, 0.5)
        ...     model.module.weight.grad
        tensor([[0.5000, 0.5000]])
    """
    check_open(model, "ops.scale_grads")
    model.strategy.scale_grads(model, factor)


def clip_norm(
    model: Wrapped,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    parameters: Iterable[Tensor] | None = None,
) -> Tensor:
    """Scale gradients so that their total norm is at most `max_norm`.

    Under fp16 the gradients are unscaled first, once per update.

    Args:
        model: The wrapped model.
        max_norm: Largest norm.
        norm_type: The p of the p-norm, above 0; `float("inf")` for the largest absolute value.
        parameters: Whose gradients count and are scaled, of the wrapped model's own, such as
            `model.module.head.parameters()`; by default all of them.

    Returns:
        Scalar, the norm before, equal on every rank, however gradients are sharded.

    Raises:
        StepError: a parameter is not one of the model, or `norm_type` is not above 0.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(4, 1, bias=False), ctx)
        ...     fx.ops.backward(model(torch.ones(1, 4)).sum(), model)
        ...     fx.ops.clip_norm(model, 1.0)
        tensor(2.)
    """
    check_open(model, "ops.clip_norm")
    if norm_type == 2 and parameters is None:
        with _lost_ranks_named(model, "clip_norm"):
            return model.strategy.clip_norm(model, max_norm)
    if not norm_type > 0:
        raise StepError(
            f"ops.clip_norm(norm_type={shown(norm_type)}): no such norm. Use a number above 0, or "
            f"float('inf')."
        )
    chosen = None if parameters is None else list(parameters)
    known = {id(parameter) for parameter in model.module.parameters()}
    if foreign := [parameter for parameter in chosen or () if id(parameter) not in known]:
        raise StepError(
            f"ops.clip_norm(parameters=...): {len(foreign)} of these {len(chosen or ())} are not "
            f"parameters of this {type(model.module).__name__}. fx.wrap may replace parameters: "
            f"take them from model.module, after it."
        )
    with _lost_ranks_named(model, "clip_norm"):
        return model.strategy.clip_norm(model, max_norm, norm_type=norm_type, parameters=chosen)


def clip_value(model: Wrapped, max_value: float) -> None:
    """Clamp every gradient entry to ±`max_value`, unscaled first under fp16.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1, bias=False), ctx)
        ...     fx.ops.backward(model(torch.ones(1, 2)).sum(), model)
        ...     fx.ops.clip_value(model, 0.25)
        ...     model.module.weight.grad
        tensor([[0.2500, 0.2500]])
    """
    check_open(model, "ops.clip_value")
    model.strategy.clip_value(model, max_value)


def apply(model: Wrapped, update: UpdateSpec = UpdateSpec()) -> UpdateResult:  # noqa: B008 - a frozen value
    """Run the optimizers, update the loss scale and zero the gradients.

    Args:
        update: What to do to the gradients before; nothing by default.

    Effects:
        Updates parameters in place. Schedulers are the caller's.

    Raises:
        StepError: the model was wrapped without an optimizer.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx,
        ...                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        ...     fx.ops.backward(model(torch.ones(1, 2)).sum(), model)
        ...     fx.ops.apply(model).applied
        True
    """
    check_open(model, "ops.apply")
    if not model.optimizers:
        raise StepError(
            "This model has no optimizer to apply. Wrap it with one: "
            "fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params)).",
            code="FX504",
        )
    model.status.added_grads = False
    with _lost_ranks_named(model, "apply"):
        result = model.strategy.apply(model, update)
    count_update(model.ctx)
    model.window.end()
    return result


def average(model: Wrapped, position: Position | None = None) -> None:
    """Average replicas that train independently (`Plan.local`), at the end of a round.

    `fx.step` does this itself. A loop written by hand calls it after each micro-batch; all
    replicas then have the same weight.

    Args:
        position: `batch.position`, by which the plan tells whether the round ends. None ends it.

    Effects:
        Changes parameters and floating-point buffers in place, with one all-reduce per dtype.
        Does nothing without `Plan.local`.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx, fx.Plan(local=fx.LocalSGD(every=8)))
        ...     fx.ops.average(model, fx.Position(updates=8))
    """
    check_open(model, "ops.average")
    if model.status.replica is not None:
        model.strategy.average(model, position)


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
    mine = as_scalar(metric, model.window.sums)
    mean = reduce(mine.reshape(()), model.ctx, op="mean").item()
    for scheduler in waiting:
        scheduler.step(mean)


def waiting_schedulers(model: Wrapped) -> list[ReduceLROnPlateau]:
    """The schedulers of a model that follow a metric."""
    schedulers = model.scheduler
    if isinstance(schedulers, Mapping):
        schedulers = list(schedulers.values())
    every = schedulers if isinstance(schedulers, list | tuple) else [schedulers]
    return [scheduler for scheduler in every if isinstance(scheduler, ReduceLROnPlateau)]


def check_loss(loss: Any) -> None:
    """Refuse a loss from which backward cannot start."""
    if not isinstance(loss, Tensor):
        raise StepError(
            f"The loss is a {type(loss).__name__}, not a tensor. Return a scalar tensor, "
            f"fx.Weighted(total, weight), or a pair of either and aux metrics.",
            code="FX502",
        )
    if loss.numel() != 1:
        raise StepError(
            f"The loss has shape {list(loss.shape)}. Return a scalar: reduce it with "
            f".mean(), or use fx.Weighted(losses.sum(), losses.numel()).",
            code="FX502",
        )
    if not loss.requires_grad:
        raise StepError(
            "The loss does not require grad. Compute it from parameters that require grad, "
            "outside torch.no_grad, and do not detach it.",
            code="FX502",
        )
