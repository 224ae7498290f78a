"""From a user's module to a wrapped one under DeepSpeed, and what that leaves on the module."""

import functools
import shutil
import warnings
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
from fxtrain.backends.core.undo import record_module
from fxtrain.backends.deepspeed import engine as engines
from fxtrain.backends.deepspeed.config import (
    ZERO,
    Inputs,
    autocasts,
    config_problems,
    device,
    hidden_size,
    resolve,
    section,
)
from fxtrain.backends.deepspeed.engine import load
from fxtrain.errors import PlanError
from fxtrain.ops.same_errors import problem_of_ranks
from fxtrain.ops.step_parts import DTYPES
from fxtrain.state import DeepSpeed, DistContext, FromConfig, Plan, Strategy, Wrapped, from_config
from fxtrain.state.deepspeed import read_config

# How torch's optimizers may compute, which DeepSpeed's do not.
_TORCH_ONLY = (
    "amsgrad",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "foreach",
    "fused",
    "initial_accumulator_value",
    "lr_decay",
    "maximize",
)


@attrs.frozen(kw_only=True, eq=False)
class EngineConfig:
    """What a model under DeepSpeed keeps.

    Attributes:
        values: The config of its engine as plain data, under DeepSpeed's own names.
    """

    values: Mapping[str, Any]


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
    if problems := ownership_problems(base, optimizer, scheduler):
        raise PlanError("\n".join(problems))
    values = auto_values(optimizer, scheduler)
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
    if is_from_config(optimizer):
        prepare_section(config, plan.strategy, ctx)
    else:
        given, several = make_optimizers(optimizer, module, model.strategy)
        if several:
            first = single_optimizer(several)
            mine = compiled_on_cpu(first, config, plan.strategy, ctx)
            given = given if mine is first else mine
    engine = engines.start(library, module, config, mine, ctx)
    engine_config = EngineConfig(values=MappingProxyType(config))
    model = attrs.evolve(model, engine=engine, strategy_state=engine_config)
    if optimizer is None:
        return model
    engines.clip_at_stage_0(engine)
    # A step advances schedulers, so the engine must not.
    planned, engine.lr_scheduler = engine.lr_scheduler, None
    schedulers = (planned,)
    if not is_from_config(scheduler):
        planned, schedulers = make_schedulers(scheduler, given or engine.basic_optimizer)
    return attrs.evolve(
        model,
        optimizer=given or engine.basic_optimizer,
        optimizers=(engine.basic_optimizer,),
        scheduler=planned,
        schedulers=schedulers,
    )


def record_changes(module: nn.Module) -> Callable[[], None]:
    """Record a module and the dtypes of its tensors; return a function that restores them.

    Values of parameters are not recorded: training changes them. What the engine adds after the
    module was wrapped is removed too.
    """
    changes_since = record_module(module, added=True)
    tensors = [
        (tensor, tensor.dtype, set(vars(tensor)))
        for tensor in (*module.parameters(), *module.buffers())
    ]

    def restore() -> None:
        changes_since().undo()
        for part in module.modules():
            part._parameters = dict(part._parameters)
        for tensor, dtype, names in tensors:
            tensor.data = tensor.data.to(dtype)
            for name in vars(tensor).keys() - names:
                delattr(tensor, name)

    return restore


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


def is_from_config(factory: Any) -> bool:
    """Whether a factory is the marker for "from the DeepSpeed config"."""
    return factory is from_config or isinstance(factory, FromConfig)


def auto_values(optimizer: Any, scheduler: Any) -> FromConfig:
    """The values for "auto": the scheduler's take precedence over the optimizer's."""
    values: dict[str, Any] = {}
    usual = attrs.asdict(FromConfig())
    for factory in (optimizer, scheduler):
        if isinstance(factory, FromConfig):
            given = attrs.asdict(factory)
            values |= {name: value for name, value in given.items() if value != usual[name]}
    return FromConfig(**values)


def ownership_problems(
    config: Mapping[str, Any], optimizer: Any, scheduler: Any
) -> tuple[str, ...]:
    """Problems with who provides optimizer and scheduler."""
    if optimizer is None and scheduler is None:
        return ()
    problems: list[str] = []
    for name, factory in (("optimizer", optimizer), ("scheduler", scheduler)):
        configured = bool(section(config, name))
        if is_from_config(factory) and not configured:
            problems.append(
                f"wrap({name}=fx.from_config): the DeepSpeed config has no {name!r} section. "
                f"Add one, or pass a factory."
            )
        if not is_from_config(factory) and configured:
            what = "none" if factory is None else "a factory"
            problems.append(
                f"The DeepSpeed config has a section {name!r}, but wrap received {what}. Pass "
                f"{name}=fx.from_config, or remove the section."
            )
    custom = scheduler is not None and not is_from_config(scheduler)
    if is_from_config(optimizer) and custom:
        problems.append(
            "wrap(optimizer=fx.from_config, scheduler=<a factory>): DeepSpeed creates the config's "
            "optimizer itself, in a class that depends on stage and offload, so a scheduler "
            "made for another class may not work. Pass scheduler=fx.from_config with a "
            "'scheduler' section, or pass a factory for the optimizer too."
        )
    return tuple(problems)


def single_optimizer(optimizers: tuple[torch.optim.Optimizer, ...]) -> torch.optim.Optimizer:
    """The optimizer that an engine steps.

    Raises:
        PlanError: there are several, or it is one that updates whole matrices.
    """
    if len(optimizers) != 1:
        raise PlanError(
            f"DeepSpeed steps one optimizer per model, but the factory returned "
            f"{len(optimizers)}. Use parameter groups of one optimizer."
        )
    if isinstance(optimizers[0], torch.optim.Muon):
        raise PlanError(
            "wrap(optimizer=...): asked for torch's Muon under DeepSpeed, which flattens "
            "parameters, and Muon updates whole matrices. Use FSDP, or DeepSpeed's own: "
            '"type": "Muon" in the section "optimizer" of its config, and optimizer=fx.from_config.'
        )
    return optimizers[0]


def compiled_on_cpu(
    optimizer: torch.optim.Optimizer, config: Mapping[str, Any], plan: DeepSpeed, ctx: DistContext
) -> torch.optim.Optimizer:
    """DeepSpeed's compiled optimizer in place of torch's, if updates run on the CPU.

    Effects:
        Compiles an operator on its first use on a machine, which takes about a minute.

    Raises:
        PlanError: `cpu_optimizer="deepspeed"` is not available; on every rank.
    """
    if device(section(config, ZERO), "offload_optimizer") == "none":
        return optimizer
    kind = type(optimizer)
    if kind.__module__.startswith("deepspeed") or not _compiles(
        kind.__name__, _why_not(optimizer), plan, ctx
    ):
        return optimizer
    groups = [
        {name: value for name, value in group.items() if name not in _TORCH_ONLY}
        for group in optimizer.param_groups
    ]
    if kind is torch.optim.Adagrad:
        return load().ops.adagrad.DeepSpeedCPUAdagrad(groups)
    return load().ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=kind is torch.optim.AdamW)


def prepare_section(config: dict[str, Any], plan: DeepSpeed, ctx: DistContext) -> None:
    """Make the config's own Adam compute without a compiler if there is none.

    Raises:
        PlanError: `cpu_optimizer="deepspeed"` is not available; on every rank.
    """
    optimizer = config.get("optimizer")
    offloaded = device(section(config, ZERO), "offload_optimizer") != "none"
    if not offloaded or not isinstance(optimizer, dict):
        return
    kind, params = str(optimizer.get("type")), optimizer.setdefault("params", {})
    if kind.lower() not in ("adam", "adamw") or params.get("torch_adam"):
        return
    if not _compiles(kind, "", plan, ctx):
        params["torch_adam"] = True


def _compiles(name: str, problem: str, plan: DeepSpeed, ctx: DistContext) -> bool:
    """Whether DeepSpeed's compiled optimizer can be used; warns if it was wanted and cannot."""
    if plan.cpu_optimizer == "torch":
        return False
    reason = problem or _without_compiler(ctx)
    if not reason:
        return True
    if plan.cpu_optimizer == "deepspeed":
        raise PlanError(
            f"DeepSpeed(cpu_optimizer='deepspeed'): {reason}. Use cpu_optimizer='torch' to "
            f"compute updates with torch's {name}, which is slower."
        )
    warnings.warn(
        f"DeepSpeed: {reason}. Updates of the offloaded optimizer are computed by torch's "
        f"{name} on the CPU, several times slower than by the compiled one; the rest of the "
        f"step is not affected. Set cpu_optimizer='torch' to silence this warning.",
        stacklevel=2,
    )
    return False


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        return f"DeepSpeed has no compiled {kind.__name__} (only Adam, AdamW and Adagrad)"
    plain = {"amsgrad": False, "maximize": False, "lr_decay": 0, "initial_accumulator_value": 0}
    special = [
        name
        for name, usual in plain.items()
        if any(group.get(name, usual) != usual for group in optimizer.param_groups)
    ]
    if special:
        return f"DeepSpeed's compiled {kind.__name__} has no {', '.join(special)}"
    return ""


def _without_compiler(ctx: DistContext) -> str:
    """Why the operator cannot be compiled on some rank, for every rank; empty if it can."""
    from torch.utils import cpp_extension

    compiler = cpp_extension.get_cxx_compiler()
    tools = {
        f"no {compiler}": shutil.which(compiler) is not None,
        "no ninja": cpp_extension.is_ninja_available(),
    }
    mine = ", ".join(problem for problem, available in tools.items() if not available)
    missing = problem_of_ranks("wrap", mine, ctx)
    if not missing:
        return ""
    return (
        f"the compiled optimizer needs a C++ compiler and ninja on every rank "
        f"({'; '.join(missing.splitlines())}; for example: apt-get install g++, pip install ninja)"
    )
