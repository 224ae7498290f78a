"""The parts of a training step, for loops written by hand.

Each calls the function of the same name of the model's strategy.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import attrs
import torch
from torch import Tensor

from fxtrain._record import shown
from fxtrain.errors import StepError
from fxtrain.ops.micro_batches import (
    end_micro_batch,
    micro_batch_of,
    one_row_each,
    run_micro_batch,
    uniform_batch,
)
from fxtrain.ops.placeholders import uncounted
from fxtrain.ops.transport.mismatches import name_lost_rank
from fxtrain.ops.weighting import (
    check_dtype,
    close_window,
    count_rows,
    loss_and_aux,
    ranks_of_update,
    weigh_loss,
)
from fxtrain.state import (
    Batch,
    MicroBatch,
    Position,
    UpdateResult,
    UpdateSpec,
    Weighted,
    Wrapped,
)
from fxtrain.state.wrapped import check_open

# Of the formats that a plan names.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def sync(
    model: Wrapped, batch: Batch | None = None, *, enabled: bool | None = None
) -> AbstractContextManager[None]:
    """A block for forward and backward of a micro-batch, in which gradients are reduced or not.

    `ops.backward` needs no block: it reduces gradients where the plan makes an update. A block
    decides otherwise, by `enabled`, or lets forward know too: for a loss on split logits
    (`TP(loss=True)`), for buffers of ranks without a row (`even="uneven"`), and where torch's DDP
    should reduce while backward runs.

    Args:
        model: The wrapped model.
        batch: The batch of the micro-batch, which `ops.backward` takes from the block. None as for
            `ops.backward`.
        enabled: Whether to reduce gradients over ranks. None follows the plan: where it makes an
            update after this micro-batch, and everywhere under `sync_each`.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx)
        ...     with fx.ops.sync(model, enabled=False):
        ...         fx.ops.backward(model(torch.ones(1, 2)).sum(), model)
    """
    check_open(model, "ops.sync")
    return _block(model, batch, enabled)


@contextmanager
def _block(model: Wrapped, batch: Batch | None, enabled: bool | None) -> Iterator[None]:  # noqa: FBT001
    status, outer = model.status, model.status.block
    batch = uniform_batch(model) if batch is None else batch
    micro_batch = _again(batch, model) or micro_batch_of(batch, model)
    planned = micro_batch.closes or model.plan.sync_each
    status.block = attrs.evolve(micro_batch, reduces=planned if enabled is None else enabled)
    try:
        with (
            model.strategy.sync(model, status.block),
            nullcontext() if micro_batch.has_rows else uncounted([model.module]),
        ):
            yield
    finally:
        status.block = outer


def _again(batch: Batch, model: Wrapped) -> MicroBatch | None:
    """The micro-batch of a batch that an earlier loss has counted; None for a new one."""
    pending = model.window.pending
    if pending is None or pending.batch is not batch:
        return None
    return micro_batch_of(batch, model, closes=pending.closes)


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


def backward(
    loss: Tensor | Weighted, model: Wrapped, batch: Batch | None = None, *, counts: bool = True
) -> None:
    """Run backward of the loss of a micro-batch, as the plan says.

    The loss is weighted and scaled as in `fx.step`, and gradients are reduced over ranks where
    the plan makes an update. Call `ops.apply` after each micro-batch, or after each window.

    Args:
        loss: A mean loss over the rows of the batch, or `Weighted(total, weight)`. Do not divide
            it by the number of micro-batches.
        model: The wrapped model.
        batch: The batch from which it was computed. Another call with the same one, or in the same
            `ops.sync` block, adds another loss of this micro-batch. None is a micro-batch that
            weighs as much as any other, on each rank, and does not end the data.
        counts: Whether the loss is one of the window. False adds its gradient as it is: not
            weighted, and not as a micro-batch.

    Effects:
        Adds to `.grad`; drops before what another model has left there, if a window begins.
        Communicates as the strategy does.

    Raises:
        StepError: the loss is not a scalar, does not require grad, does not depend on the model, or
            is in half precision because it was computed outside of `ops.autocast`; or the window
            is complete, and `ops.apply` was not called.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     plan = fx.Plan(accumulate=2)
        ...     model = fx.wrap(torch.nn.Linear(2, 1, bias=False), ctx, plan)
        ...     fx.ops.backward(model(torch.ones(1, 2)).sum(), model)
        ...     model.module.weight.grad
        tensor([[0.5000, 0.5000]])
    """
    check_open(model, "ops.backward")
    whole, _ = loss_and_aux(loss)
    if model.plan.precision.compute != "fp32":
        check_dtype("ops.backward", whole, model)
    if model.ctx.world_size > 1 and "backward" in dict(model.strategy.fused):
        model.strategy.backward(getattr(whole, "total", whole), model)  # says why it cannot
    with _lost_ranks_named(model, "backward"):
        if counts:
            _backward_of_batch(whole, model, batch)
        else:
            _backward_alone(whole, model)
    model.window.added = True
    _check_reached(model)


def _check_reached(model: Wrapped) -> None:
    """Refuse the loss of another model, after its backward; only full gradients show it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if model.strategy.full_parameters and trained and all(p.grad is None for p in trained):
        raise StepError(
            f"ops.backward: the loss does not depend on a parameter of this "
            f"{type(model.module).__name__}. Pass the model that computed the loss, or call "
            f"loss.backward() where it comes from a module that is not wrapped.",
            code="FX502",
        )


def _backward_of_batch(loss: Tensor | Weighted, model: Wrapped, batch: Batch | None) -> None:
    """Backward of a loss of the batch, of that of the block around it, or of none."""
    block, plan, pending = model.status.block, model.plan, model.window.pending
    if block is not None:
        if batch is not None and batch is not block.batch:
            raise StepError(
                "ops.backward got another batch than the ops.sync block around it. Pass the batch "
                "to the block: `with fx.ops.sync(model, batch):`."
            )
        batch = block.batch
    elif batch is None:
        batch = uniform_batch(model)
    again = _again(batch, model)
    if again is not None and model.window.micro and type(loss) is Weighted:
        raise StepError(
            "ops.backward got a second loss of one micro-batch as Weighted(total, weight). Add up "
            "the totals and the weights, and pass one Weighted."
        )
    if again is None and pending is not None and pending.closes and plan.accumulate > 1:
        raise StepError(
            f"ops.backward: the accumulation window is complete, with {plan.accumulate} "
            f"micro-batches, and ops.apply was not called. Call fx.ops.apply(model) after each "
            f"micro-batch; it makes an update where Plan(accumulate={plan.accumulate}) says so."
        )
    model.window.pending = micro_batch = again or micro_batch_of(batch, model)
    run_micro_batch(
        micro_batch, model, lambda m, b: weigh_loss(loss, None, b, m), counts=again is None
    )


def _backward_alone(loss: Tensor | Weighted, model: Wrapped) -> None:
    """Backward of a loss that is no part of the window."""
    if isinstance(loss, Weighted):
        raise StepError(
            "ops.backward(counts=False) adds the gradient of a loss as it is, and takes a scalar "
            "tensor, found Weighted. Divide its total by its weight."
        )
    status, window = model.status, model.window
    if not window.is_open:
        model.strategy.begin(model)
    running = status.block
    if running is None:
        running = micro_batch_of(one_row_each(model), model, closes=window.closes or None)
    status.running = running
    try:
        with nullcontext() if status.block is not None else model.strategy.sync(model, running):
            model.strategy.backward(loss, model)
    finally:
        status.running = None


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

    `ops.apply` clips as the plan says; this is for other norms, and for some of the parameters.
    Call it between `ops.backward` and `ops.apply`, where the window closes: `model.window.closes`.
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
    _weigh_window(model)
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


def _weigh_window(model: Wrapped) -> None:
    """Correct the weight of a window that is complete, which `apply` would do after clipping."""
    window = model.window
    if window.closes and (window.micro or window.provisional):
        scale = close_window(model)
        window.provisional, window.full_rows = False, window.rows
        if scale is not None:
            model.strategy.scale_grads(model, scale)


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
    _weigh_window(model)
    model.strategy.clip_value(model, max_value)


def apply(
    model: Wrapped,
    update: UpdateSpec | None = None,
    *,
    now: bool = False,
    advance: bool = True,
    zero: bool = True,
) -> UpdateResult:
    """End a micro-batch, with an update where the plan makes one.

    An update does what `fx.step` does after backward: it corrects the weight of a short window,
    skips non-finite values or raises, clips, runs the optimizers, updates the loss scale, advances
    schedulers and zeroes gradients. Then replicas are averaged or compared, as the plan says.

    Call it after each micro-batch, or after each window. Without `ops.backward` before, it counts
    one micro-batch, whose gradients `loss.backward()` has added.

    Args:
        model: The wrapped model.
        update: What to do to gradients before the optimizers run, in place of the plan's
            `clip_norm`, `clip_value` and `nonfinite`; `UpdateSpec()` does nothing.
        now: Make an update now, although the window is not complete.
        advance: Whether to advance schedulers.
        zero: Whether to zero gradients. False keeps them for reading, as the optimizers got them,
            until the next window begins.

    Returns:
        Whether an update was due and applied, and the norm before clipping.

    Effects:
        Updates parameters in place. Communicates as the strategy does; as `fx.step` for
        `Weighted` losses and `nonfinite`.

    Raises:
        StepError: the model was wrapped without an optimizer; `now=True` finds gradients that are
            not reduced; or as `fx.step`.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx, fx.Plan(accumulate=2),
        ...                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        ...     for row in torch.ones(4, 1, 2):
        ...         fx.ops.backward(model(row).sum(), model)
        ...         print(fx.ops.apply(model).applied)
        False
        True
        False
        True
    """
    check_open(model, "ops.apply")
    if not model.optimizers:
        raise StepError(
            "This model has no optimizer to apply. Wrap it with one: "
            "fx.wrap(net, ctx, plan, optimizer=lambda params: torch.optim.AdamW(params)).",
            code="FX504",
        )
    window = model.window
    micro_batch, window.pending = window.pending, None
    if micro_batch is None:
        counts = not (now and window.micro)
        batch = uniform_batch(model)
        micro_batch = micro_batch_of(batch, model, closes=None if counts else False)
        if counts and (window.micro or not micro_batch.closes):
            count_rows(batch, model)
    if now and not micro_batch.closes:
        if window.unreduced and ranks_of_update(model).world_size > 1:
            raise StepError(
                "ops.apply(now=True): gradients are not reduced over ranks, since the plan makes "
                "no update after this micro-batch. Run its backward in `with fx.ops.sync(model, "
                "enabled=True):`, or pass the batch to ops.backward, if the data ends with it."
            )
        micro_batch = attrs.evolve(micro_batch, closes=True)
    with _lost_ranks_named(model, "apply"):
        result = end_micro_batch(micro_batch, model, update, advance=advance, zero=zero)
    model.status.averaged = model.plan.local is not None
    return result


def average(model: Wrapped, position: Position | None = None) -> None:
    """Average replicas that train independently (`Plan.local`), at the end of a round.

    `fx.step` and `ops.apply` do this themselves. A loop that calls `optimizer.step()` calls it
    after each micro-batch; all replicas then have the same weight.

    Args:
        position: `batch.position`, from which the plan finds whether the round ends. None ends it.

    Effects:
        Changes parameters and floating-point buffers in place, with one all-reduce per dtype.
        Does nothing without `Plan.local`, nor with a position after an `ops.apply`.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx, fx.Plan(local=fx.LocalSGD(every=8)))
        ...     fx.ops.average(model, fx.Position(updates=8))
    """
    check_open(model, "ops.average")
    done, model.status.averaged = model.status.averaged, False
    average = model.strategy.average
    if model.status.replica is None or average is None or (done and position is not None):
        return
    average(model, position)
