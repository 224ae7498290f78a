"""From a user's module to a wrapped one under DeepSpeed, and what that leaves on the module."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import nn

from fxtrain.backends.core import step_functions
from fxtrain.backends.core.module_changes import move_module, prepare_module, send_values
from fxtrain.backends.core.optimizers import make_optimizers, make_schedulers
from fxtrain.backends.core.trained_parameters import TrainedParameters
from fxtrain.backends.deepspeed import engine as engines
from fxtrain.backends.deepspeed import optimizer as optim
from fxtrain.backends.deepspeed.config import (
    ZERO,
    Inputs,
    autocasts,
    config_problems,
    hidden_size,
    resolve,
)
from fxtrain.errors import PlanError
from fxtrain.ops.step_parts import DTYPES
from fxtrain.state import DeepSpeed, DistContext, Plan, Strategy, Wrapped
from fxtrain.state.deepspeed import read_config

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@attrs.frozen(kw_only=True, eq=False)
class EngineConfig:
    """What a model under DeepSpeed keeps: the config of its engine, and what the engine trains.

    Attributes:
        values: As plain data, under DeepSpeed's own names.
        trained: The parameters that the engine has flattened; None if it flattens none.
    """

    values: Mapping[str, Any]
    trained: TrainedParameters | None = None


def zero_init(ctx: DistContext, plan: Plan) -> AbstractContextManager[object]:
    """Build a model inside this region without any rank ever holding all of it.

    Under `DeepSpeed(stage=3)`, parameters are sharded as they are created. Under any other plan,
    nothing happens, so a script may always use it.

    Effects:
        Opens DeepSpeed's process group.

    Raises:
        MissingPackageError: deepspeed is not installed.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     with fx.zero_init(ctx, fx.Plan()):
        ...         net = torch.nn.Linear(2, 1)
    """
    if not isinstance(plan.strategy, DeepSpeed):
        return nullcontext()
    base = read_config(plan.strategy)
    base.pop("optimizer", None)
    base.pop("scheduler", None)
    config = resolve(plan, base, Inputs(ranks=ctx.axis("data").world_size, partial=True))
    if config[ZERO]["stage"] != 3:
        return nullcontext()
    library = engines.load()
    engines.connect(library, ctx)
    return library.zero.Init(config_dict_or_path=config)


def keeps_masters(plan: Plan) -> bool:
    """Whether an engine of DeepSpeed keeps parameters in fp32 beside those that compute."""
    return isinstance(plan.strategy, DeepSpeed) and not autocasts(read_config(plan.strategy))


def wrap_engine(
    strategy: Strategy,
    module: nn.Module,
    ctx: DistContext,
    plan: Plan,
    optimizer: Any,
    scheduler: Any,
) -> Wrapped:
    """Wrap a module in an engine; without an optimizer, only stage 3 needs one."""
    library = engines.load()
    data = ctx.axis("data")
    config = _resolved_config(module, plan, data.world_size, optimizer, scheduler)
    engines.check_folders(config, ctx)
    model = Wrapped(
        module=module,
        engine=module,
        ctx=ctx,
        plan=plan,
        strategy=strategy,
        window=step_functions.new_window(ctx),
        undo=record_changes(module),
    )
    prepare_module(module, plan, ctx)
    autocast_inside(module, plan, ctx.device.type)
    if optimizer is None and config[ZERO]["stage"] < 3:
        # Nothing to shard at these stages.
        move_module(module, ctx.device)
        send_values((*module.parameters(), *module.buffers()), data)
        return attrs.evolve(model, strategy_state=EngineConfig(values=MappingProxyType(config)))
    engines.connect(library, ctx)
    model = _with_engine(library, model, config, optimizer, scheduler)
    send_values(module.buffers(), data)
    if optimizer is not None and plan.nonfinite != "ignore" and plan.precision.compute != "fp16":
        watch_gradients(module, model.window.bad_grads)
    return model


def _resolved_config(
    module: nn.Module, plan: Plan, ranks: int, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    base = read_config(plan.strategy)
    if optimizer is None:
        base = {key: base[key] for key in base if key not in ("optimizer", "scheduler")}
    if problems := optim.ownership_problems(base, optimizer, scheduler):
        raise PlanError("\n".join(problems))
    values = optim.auto_values(optimizer, scheduler)
    config = resolve(plan, base, Inputs(ranks=ranks, hidden=hidden_size(module), values=values))
    problems = [*config_problems(config, ranks)]
    if config.get("managed_gradient_accumulation", True) and plan.sync_each:
        problems.append(
            "Plan(sync_each=True): where DeepSpeed counts micro-batches itself, it reduces once "
            "per update (stages 0 and 1) or always (2 and 3). Use sync_each=False."
        )
    if problems:
        raise PlanError("\n".join(problems))
    return config


def _with_engine(
    library: Any, model: Wrapped, config: dict[str, Any], optimizer: Any, scheduler: Any
) -> Wrapped:
    module, ctx, plan = model.module, model.ctx, model.plan
    given, mine = None, None
    if optim.is_from_config(optimizer):
        optim.prepare_section(config, plan.strategy, ctx)
    else:
        given, several = make_optimizers(optimizer, module, model.strategy)
        if several:
            first = optim.single_optimizer(several)
            mine = optim.compiled_on_cpu(first, config, plan.strategy, ctx)
            given = given if mine is first else mine
    flattens = optimizer is not None and config[ZERO]["stage"] > 0
    trained = TrainedParameters.of(module) if flattens else None
    engine = engines.start(library, module, config, mine, ctx)
    engine_config = EngineConfig(values=MappingProxyType(config), trained=trained)
    model = attrs.evolve(model, engine=engine, strategy_state=engine_config)
    if optimizer is None:
        return model
    engines.clip_at_stage_0(engine)
    # A step advances schedulers, so the engine must not.
    planned, engine.lr_scheduler = engine.lr_scheduler, None
    schedulers = (planned,)
    if not optim.is_from_config(scheduler):
        planned, schedulers = make_schedulers(scheduler, given or engine.basic_optimizer)
    return attrs.evolve(
        model,
        optimizer=given or engine.basic_optimizer,
        optimizers=(engine.basic_optimizer,),
        scheduler=planned,
        schedulers=schedulers,
    )


def record_changes(module: nn.Module) -> Callable[[], None]:
    """Record a module's attributes, hooks and dtypes; return a function that restores them.

    Values of parameters are not recorded: training changes them.
    """
    parts = [(part, set(vars(part)), _hook_keys(part)) for part in module.modules()]
    tensors = [
        (tensor, tensor.dtype, set(vars(tensor)))
        for tensor in (*module.parameters(), *module.buffers())
    ]

    def restore() -> None:
        for part, names, keys in parts:
            part._parameters = dict(part._parameters)
            for name in vars(part).keys() - names:
                del part.__dict__[name]
            for name, known in keys.items():
                hooks = getattr(part, name)
                for key in [key for key in hooks if key not in known]:
                    del hooks[key]
        for tensor, dtype, names in tensors:
            tensor.data = tensor.data.to(dtype)
            for name in vars(tensor).keys() - names:
                delattr(tensor, name)

    return restore


def _hook_keys(part: nn.Module) -> dict[str, set[Any]]:
    return {name: set(getattr(part, name)) for name in _HOOKS}


def autocast_inside(module: nn.Module, plan: Plan, device: str) -> None:
    """Run a module's forward under autocast, inside what the engine puts around it.

    DeepSpeed disables an autocast region that it finds around an engine. Over weights in the same
    dtype, autocast only affects the inputs.
    """
    if plan.precision.compute != "fp32":
        dtype = DTYPES[plan.precision.compute]
        module.forward = functools.partial(_under_autocast, module.forward, device, dtype)


def _under_autocast(
    forward: Callable[..., Any], device: str, dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    with torch.autocast(device, dtype=dtype):
        return forward(*args, **kwargs)


def watch_gradients(module: nn.Module, count: torch.Tensor) -> None:
    """Count non-finite gradients as backward computes them.

    Afterwards they are in the engine's buffers, in a form that depends on stage and offload.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(functools.partial(_note, count))


def _note(count: torch.Tensor, grad: torch.Tensor) -> None:
    count.add_(~torch.isfinite(grad).all())
