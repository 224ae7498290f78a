"""One rank: the module as it is; and the handle of every strategy on torch's own modules."""

from collections.abc import Callable
from typing import Any

from torch import nn

from fxtrain import _extensions
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.initial_values import fill_replica
from fxtrain.backends.core.model_state import load_state, state_of
from fxtrain.backends.core.module_changes import (
    move_module,
    prepare_module,
    xla_problems,
)
from fxtrain.backends.core.optimizers import (
    make_optimizers,
    make_schedulers,
    refuse_later_parameters,
)
from fxtrain.backends.core.replica_digests import verify_replicas
from fxtrain.backends.core.weights import torch_weights
from fxtrain.state import DistContext, Plan, Single, Strategy, Wrapped
from fxtrain.state.window import ModelStatus


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
    if plan.context is not None:
        _extensions.expose_positions(module, ctx, plan)
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
    undo: Callable[[], None] = lambda: None,
    change: Any = None,
    replicas: Any = None,
    status: ModelStatus | None = None,
) -> Wrapped:
    """Call the factories on a module in its final form, and build the handle.

    Args:
        undo: Reverts what wrapping did to the values of the module.
        change: As `make_optimizers` takes it.
        replicas: Likewise.
        status: The mutable part of the handle, where hooks of the module read it; None for a new
            one.
    """
    objects, optimizers = make_optimizers(optimizer, module, ctx, strategy, change, replicas)
    if ctx.world_size > 1:
        refuse_later_parameters(optimizers, module)
    planned, schedulers = make_schedulers(scheduler, objects)
    updated = {p for each in optimizers for group in each.param_groups for p in group["params"]}
    if plan.context is not None:
        strategy = _extensions.with_context_parallel(strategy, ctx, plan)
    status = ModelStatus() if status is None else status
    status.others = [p for p in module.parameters() if p not in updated] if optimizers else []
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
        strategy=strategy,
        window=step_functions.new_window(ctx),
        undo=undo,
        status=status,
    )


def _check(ctx: DistContext, plan: Plan, module: nn.Module) -> tuple[str, ...]:
    problems = [*xla_problems(ctx, "Single")]
    if ctx.world_size > 1:
        problems.append(
            f"Single() trains on one rank, but this context has {ctx.world_size}, which would "
            f"train separate models. Use DDP(), or launch one process."
        )
    return tuple(problems)


def _unwrap(model: Wrapped) -> nn.Module:
    model.undo()
    return model.module


def _verify(model: Wrapped) -> None:
    verify_replicas(model)  # looked up here, where a replay replaces it


SINGLE = Strategy(
    name="Single",
    config=Single,
    check=_check,
    wrap=wrap_without_engine,
    forward=step_functions.forward,
    sync=step_functions.no_sync,
    backward=step_functions.backward,
    begin=step_functions.begin,
    run=step_functions.run,
    clip_norm=step_functions.clip_norm,
    clip_value=step_functions.clip_value,
    scale_grads=step_functions.scale_grads,
    finite=step_functions.finite,
    apply=step_functions.apply,
    state=state_of,
    load_state=load_state,
    weights=torch_weights,
    unwrap=_unwrap,
    one_rank=True,
    waits_in_forward=False,
    grads_in_module=True,
    full_parameters=True,
    converts_layers=True,
    updates_on_host=True,
    verify=_verify,
)
