"""The handle of a wrapped model, as every strategy on torch's own modules makes it."""

from collections.abc import Callable
from typing import Any

from torch import nn

from fxtrain.backends.context.positions import expose_positions
from fxtrain.backends.context.split_sequences import with_context_parallel
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.initial_values import fill_replica
from fxtrain.backends.core.module_changes import move_module, prepare_module
from fxtrain.backends.core.optimizers import (
    make_optimizers,
    make_schedulers,
    refuse_later_parameters,
)
from fxtrain.state import DistContext, Plan, Strategy, Wrapped


def _nothing() -> None:
    pass


def wrap_without_engine(
    strategy: Strategy,
    module: nn.Module,
    ctx: DistContext,
    plan: Plan,
    optimizer: Any,
    scheduler: Any,
    *,
    change: Any = None,
    replicas: Any = None,
) -> Wrapped:
    """Wrap a module that is its own engine; `change` and `replicas` as `make_optimizers`."""
    fill_replica(module, ctx, seed=plan.seed)
    move_module(module, ctx.device)
    expose_positions(module, ctx, plan)
    prepare_module(module, plan, ctx)
    return make_handle(
        strategy, module, ctx, plan, optimizer, scheduler, change=change, replicas=replicas
    )


def make_handle(
    strategy: Strategy,
    module: nn.Module,
    ctx: DistContext,
    plan: Plan,
    optimizer: Any,
    scheduler: Any,
    *,
    undo: Callable[[], None] = _nothing,
    change: Any = None,
    replicas: Any = None,
) -> Wrapped:
    """Call the factories on a module in its final form, and build the handle.

    Args:
        undo: Reverts what wrapping did to the values of the module.
        change: As `make_optimizers` takes it.
        replicas: Likewise.
    """
    objects, optimizers = make_optimizers(optimizer, module, strategy, change, replicas)
    refuse_later_parameters(optimizers, module, ctx)
    planned, schedulers = make_schedulers(scheduler, objects)
    return Wrapped(
        module=module,
        engine=module,
        optimizer=objects,
        scheduler=planned,
        optimizers=optimizers,
        schedulers=schedulers,
        scaler=step_functions.new_scaler(ctx, plan) if optimizers else None,
        ctx=ctx,
        plan=plan,
        strategy=with_context_parallel(strategy, ctx, plan),
        window=step_functions.new_window(ctx),
        undo=undo,
    )
