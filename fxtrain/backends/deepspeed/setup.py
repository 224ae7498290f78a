"""From a user's module to a wrapped one under DeepSpeed, and what that leaves on the module."""

import shutil
import warnings
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import nn

from fxtrain import ops
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.module_changes import (
    move_module,
    prepare_module,
    record_module,
    send_values,
)
from fxtrain.backends.core.optimizers import make_optimizers, make_schedulers
from fxtrain.backends.deepspeed import engine as engines
from fxtrain.backends.deepspeed.config import (
    ZERO,
    config_problems,
    device,
    hidden_size,
    resolve,
    section,
)
from fxtrain.backends.deepspeed.engine import load
from fxtrain.errors import PlanError
from fxtrain.ops.step_parts import DTYPES
from fxtrain.state import DeepSpeed, DistContext, FromConfig, Plan, Strategy, Wrapped, from_config
from fxtrain.state.deepspeed import read_config

# How torch's optimizers may update, and how they may compute, which DeepSpeed's do not.
_SPECIAL = ("amsgrad", "maximize", "lr_decay", "initial_accumulator_value")
_TORCH_ONLY = (
    *_SPECIAL,
    *("capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused"),
)


@attrs.frozen(kw_only=True, eq=False)
class EngineConfig:
    """What a model under DeepSpeed keeps.

    Attributes:
        values: The config of its engine as plain data, under DeepSpeed's own names.
        trained: The parameters that the engine has flattened; None if it flattens none.
    """

    values: Mapping[str, Any]
    trained: Set[nn.Parameter] | None = None


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
    config = resolve(plan, base, ranks=ctx.axis("data").world_size, partial=True)
    if config[ZERO]["stage"] != 3:
        return nullcontext()
    library = engines.load()
    engines.connect(library, ctx)
    return library.zero.Init(config_dict_or_path=config)


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
    config = resolve(plan, base, ranks=ranks, hidden=hidden_size(module), values=values)
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
        given, several = make_optimizers(optimizer, module, ctx, model.strategy)
        if several:
            first = single_optimizer(several)
            mine = compiled_on_cpu(first, config, plan.strategy, ctx)
            given = given if mine is first else mine
    engine = engines.start(library, module, config, mine, ctx)
    trained = {p for p in module.parameters() if p.requires_grad}
    flattens = optimizer is not None and config[ZERO]["stage"] > 0
    engine_config = EngineConfig(
        values=MappingProxyType(config), trained=trained if flattens else None
    )
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
        module.forward = torch.autocast(device, dtype=dtype)(module.forward)


def watch_gradients(module: nn.Module, count: torch.Tensor) -> None:
    """Count non-finite gradients as backward computes them.

    Afterwards they are in the engine's buffers, in a form that depends on stage and offload.
    """

    def note(grad: torch.Tensor) -> None:
        count.add_(~torch.isfinite(grad).all())

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(note)


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
        if is_from_config(factory) is not bool(section(config, name)):
            problems.append(
                f"wrap({name}=...): pass fx.from_config if and only if the DeepSpeed config has a "
                f"section {name!r}."
            )
    if is_from_config(optimizer) and not (scheduler is None or is_from_config(scheduler)):
        problems.append(
            "wrap(optimizer=fx.from_config, scheduler=<a factory>): DeepSpeed creates the config's "
            "optimizer itself, in a class that depends on stage and offload, so a scheduler "
            "made for another class may not work. Pass scheduler=fx.from_config, or a factory for "
            "the optimizer too."
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
    kind = type(optimizer)
    offloaded = device(section(config, ZERO), "offload_optimizer") != "none"
    if not offloaded or kind.__module__.startswith("deepspeed"):
        return optimizer
    problem = ""
    if kind not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        problem = f"DeepSpeed has no compiled {kind.__name__}"
    elif special := [n for n in _SPECIAL if any(g.get(n) for g in optimizer.param_groups)]:
        problem = f"DeepSpeed's compiled {kind.__name__} has no {', '.join(special)}"
    if not _compiles(kind.__name__, problem, plan, ctx):
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
    from torch.utils import cpp_extension

    if plan.cpu_optimizer == "torch":
        return False
    if not problem:
        has_compiler = shutil.which(cpp_extension.get_cxx_compiler()) is not None
        if ops.all_ranks(has_compiler and cpp_extension.is_ninja_available(), ctx):
            return True
        problem = (
            "the compiled optimizer needs a C++ compiler and ninja on every rank (for example: "
            "apt-get install g++, pip install ninja)"
        )
    if plan.cpu_optimizer == "deepspeed":
        raise PlanError(f"DeepSpeed(cpu_optimizer='deepspeed'): {problem}. Use 'torch'.")
    warnings.warn(
        f"DeepSpeed: {problem}. Updates of the offloaded optimizer are computed by torch's "
        f"{name} on the CPU, several times slower than by the compiled one. Set "
        f"cpu_optimizer='torch' to silence this warning.",
        stacklevel=2,
    )
    return False
