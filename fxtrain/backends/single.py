"""One rank: the module as it is."""

from torch import nn

from fxtrain.backends.core import step_functions
from fxtrain.backends.core.model_state import load_state, state_of
from fxtrain.backends.core.module_changes import (
    unmatched_names,
    xla_problems,
)
from fxtrain.backends.core.weights import torch_weights
from fxtrain.backends.handle import wrap_without_engine
from fxtrain.state import DistContext, Plan, Single, Strategy, Wrapped, unsupported


def _check(ctx: DistContext, plan: Plan, module: nn.Module) -> tuple[str, ...]:
    problems = [*unmatched_names(module, plan), *xla_problems(ctx, "Single")]
    if ctx.world_size > 1:
        problems.append(
            f"Single() trains on one rank, but this context has {ctx.world_size}, which would "
            f"train separate models. Use DDP(), or launch one process."
        )
    return tuple(problems)


def _unwrap(model: Wrapped) -> nn.Module:
    model.undo()
    return model.module


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
    full_parameters=True,
    converts_layers=True,
    updates_on_host=True,
    verifies_replicas=True,
    average=unsupported("averaging of replicas", by="Single, which has only one,"),
)
