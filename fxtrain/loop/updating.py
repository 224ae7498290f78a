"""The update of a loop that computes its loss itself."""

from typing import Any

import torch
from torch import Tensor

from fxtrain._errors import StepError
from fxtrain.loop.stepping import StepFns, check_step, step
from fxtrain.state import Batch, DistContext, Report, Weighted, Wrapped

__all__ = ["update"]

_HALF = (torch.bfloat16, torch.float16)


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
    if not fits or model.closed or ctx.comm.state.closed:
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
