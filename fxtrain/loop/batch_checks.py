"""What a step refuses before it runs anything."""

from typing import Any, NoReturn

from fxtrain._errors import DataError, StepError
from fxtrain.data import Sharded
from fxtrain.state import (
    Batch,
    DistContext,
    Plan,
    Wrapped,
    check_connected,
    check_open,
    shown,
)

__all__ = ["check_ready"]


def check_ready(call: str, ctx: DistContext, batch: Any, model: Wrapped) -> None:
    """Refuse what a micro-batch cannot be trained with.

    Raises:
        FxError: what `step` raises before it runs anything.
    """
    if type(batch) is not Batch:
        _refuse_batch(call, batch)
    check_open(model, call)
    check_connected(call, ctx)
    _check_plans(call, batch.plan, model.plan)
    if not model.optimizers:
        raise StepError(
            f"{call}: this model has no optimizer. Wrap it with one: fx.wrap(net, ctx, plan, "
            f"optimizer=lambda params: torch.optim.AdamW(params)).",
            code="FX504",
        )


def _refuse_batch(call: str, found: Any) -> NoReturn:
    name = type(found).__name__
    use = "`for batch in loader:`, where loader = fx.shard(DataLoader(...), ctx, plan)"
    if isinstance(found, Sharded):
        name, use = "its loader", "loader.batch, which is the batch that the loop has reached"
        if _is_untouched(found):
            name = "the loader of an epoch"
            use = f"`for epoch in loader.epochs(n): for batch in epoch: fx.{call}(ctx, batch, ...)`"
    elif isinstance(found, DistContext | Wrapped):
        use = f"fx.{call}(ctx, batch, {'fns' if call == 'step' else 'model, loss'})"
    else:
        use += ", or fx.batch(data, ctx, plan) for data of your own"
    raise StepError(f"{call} takes a Batch, found {name}. Use {use}.")


def _is_untouched(loader: Sharded[object]) -> bool:
    """Whether nothing has iterated a loader."""
    try:
        return loader.batch is None
    except DataError:
        return True


def _check_plans(call: str, loader: Plan | None, model: Plan) -> None:
    """Refuse a batch whose sequences the loader splits in another way than the model."""
    if loader is not None and loader.context != model.context:
        raise StepError(
            f"{call}: the loader splits sequences in another way than the model: context is "
            f"{shown(model.context)} in fx.wrap and {shown(loader.context)} in fx.shard. Pass the "
            f"same plan to both: fx.wrap(net, ctx, plan, ...) and fx.shard(loader, ctx, plan)."
        )
