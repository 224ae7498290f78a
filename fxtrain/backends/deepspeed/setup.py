"""From a user's module to a wrapped one under DeepSpeed, with an engine over a context's ranks."""

import copy
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import attrs
import torch
from torch import distributed as dist
from torch import nn

from fxtrain import ops
from fxtrain._optional import optional
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.module_changes import (
    move_module,
    prepare_module,
    record_module,
    send_values,
)
from fxtrain.backends.core.optimizers import make_optimizers, make_schedulers
from fxtrain.backends.deepspeed.config import (
    ZERO,
    config_problems,
    device,
    hidden_size,
    partial_config,
    resolve_deepspeed,
    section,
)
from fxtrain.backends.deepspeed.config_file import read_config
from fxtrain.errors import MissingPackageError, PlanError
from fxtrain.ops.connecting import ensure_group, export_local_rank
from fxtrain.ops.opening import open_by_members
from fxtrain.ops.step_parts import DTYPES
from fxtrain.state import DeepSpeed, DistContext, FromConfig, Plan, Strategy, Wrapped, from_config

_MIN_VERSION = (0, 19)
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
    config = partial_config(plan, ctx.axis("data").world_size)
    if config[ZERO]["stage"] != 3:
        return nullcontext()
    library = import_deepspeed()
    connect(library, ctx)
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
    library = import_deepspeed()
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
    if plan.precision.compute != "fp32":
        # Inside what the engine puts around it, which disables an autocast region that it finds.
        # Over weights in the same dtype, autocast only affects the inputs.
        region = torch.autocast(ctx.device.type, dtype=DTYPES[plan.precision.compute])
        module.forward = region(module.forward)
    if optimizer is None and config[ZERO]["stage"] < 3:
        # Nothing to shard at these stages.
        move_module(module, ctx.device)
        send_values((*module.parameters(), *module.buffers()), data)
        return attrs.evolve(model, strategy_state=EngineConfig(values=MappingProxyType(config)))
    connect(library, ctx)
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
    config = resolve_deepspeed(plan, base, ranks=ranks, hidden=hidden_size(module), values=values)
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
    given, compiled = None, None
    if is_from_config(optimizer):
        prepare_section(config, plan.strategy, ctx)
    else:
        given, several = make_optimizers(optimizer, module, ctx, model.strategy)
        if several:
            first = single_optimizer(several)
            compiled = compiled_on_cpu(first, config, plan.strategy, ctx)
            given = given if compiled is first else compiled
    engine = start(library, module, config, compiled, ctx)
    trained = {p for p in module.parameters() if p.requires_grad}
    flattens = optimizer is not None and config[ZERO]["stage"] > 0
    engine_config = EngineConfig(
        values=MappingProxyType(config), trained=trained if flattens else None
    )
    model = attrs.evolve(model, engine=engine, strategy_state=engine_config)
    if optimizer is None:
        return model
    clip_at_stage_0(engine)
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
        revert, _ = changes_since()
        revert()
        for part in module.modules():
            part._parameters = dict(part._parameters)
        for tensor, dtype, names in tensors:
            tensor.data = tensor.data.to(dtype)
            for name in vars(tensor).keys() - names:
                delattr(tensor, name)

    return restore


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
        return import_deepspeed().ops.adagrad.DeepSpeedCPUAdagrad(groups)
    return import_deepspeed().ops.adam.DeepSpeedCPUAdam(
        groups, adamw_mode=kind is torch.optim.AdamW
    )


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


def import_deepspeed(needed_by: str = "Plan(strategy=DeepSpeed(...))") -> ModuleType:
    """The deepspeed package.

    Raises:
        MissingPackageError: deepspeed is not installed, or older than 0.19.
    """
    with _ignore_import_warnings():
        library = optional("deepspeed", extra="deepspeed", needed_by=needed_by)
    version = str(library.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_VERSION:
        wanted = ".".join(map(str, _MIN_VERSION))
        raise MissingPackageError(
            f"{needed_by} needs deepspeed {wanted} or newer, but {version} is installed. "
            f"Install it with: pip install --upgrade 'deepspeed>={wanted}'",
            name="deepspeed",
        )
    return library


def device_problems(ctx: DistContext, plan: Plan) -> tuple[str, ...]:
    """Problems of the device with a plan."""
    accelerator = import_deepspeed().accelerator.get_accelerator()
    name = accelerator.device_name()
    if name != ctx.device.type:
        if ctx.comm.simulated:  # the ranks may run on other machines than this one
            return ()
        return (
            f"DeepSpeed computes on {name} here, but this context is on {ctx.device.type}. Set the "
            f"variable DS_ACCELERATOR={ctx.device.type} before the run starts.",
        )
    supports = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    compute = plan.precision.compute
    if compute in supports and not supports[compute]():
        return (f"DeepSpeed does not support {compute} on {name}. Use precision='fp32'.",)
    return ()


def connect(library: ModuleType, ctx: DistContext) -> None:
    """Make DeepSpeed use torch's existing process group.

    Effects:
        At one rank, opens a group of one. DeepSpeed opens one more group of all ranks, and
        finds LOCAL_RANK in the environment.
    """
    ensure_group(ctx)
    export_local_rank(ctx)
    groups = library.utils.groups
    if groups._WORLD_GROUP is not None and not _ranks_of(groups._WORLD_GROUP):
        # A closed and reopened context left DeepSpeed its destroyed groups.
        groups._release_process_group_references(None)
    release_groups(library, ctx)
    if library.comm.is_initialized():
        return
    # Its shared-memory operator, which compiles for half a minute, is for inference only.
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with _ignore_import_warnings():
        library.init_distributed(
            dist_backend=library.accelerator.get_accelerator().communication_backend_name(),
            auto_mpi_discovery=False,
            verbose=False,
        )


def start(
    library: ModuleType,
    module: nn.Module,
    config: Mapping[str, Any],
    optimizer: torch.optim.Optimizer | None,
    ctx: DistContext,
) -> Any:
    """The engine.

    Effects:
        With sequence parallelism, opens a group of this rank alone.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    settings = copy.deepcopy(dict(config))
    groups = sequence_groups(library, ctx)
    if groups is not None:
        library.utils.groups.mpu = groups
        # From these it would create its own groups, which lack the reduction over sequences.
        settings.pop("sequence_parallel_size", None)
        settings.pop("data_parallel_size", None)
    if ctx.axis("tensor").world_size > 1:
        del settings["train_batch_size"]  # DeepSpeed also counts the tensor ranks
    with _ignore_import_warnings():
        engine, *_ = library.initialize(
            model=module,
            optimizer=optimizer,
            model_parameters=trained,
            mpu=groups,
            config=settings,
        )
    return engine


def clip_at_stage_0(engine: Any) -> None:
    """Make stage 0 behave as the other stages do.

    Effects:
        In full precision, the engine stores the norm by which it clips. In half precision, the
        optimizer undoes the update with zero gradients by which it created its states: that
        update changed weights under weight decay, and counted as a step.
    """
    if hasattr(engine.optimizer, "fp32_groups"):
        engine.basic_optimizer.state.clear()
        pairs = zip(engine.optimizer.fp32_groups, engine.optimizer.fp16_groups, strict=True)
        for masters, weights in pairs:
            for master, weight in zip(masters, weights, strict=True):
                master.data.copy_(weight.data)
    elif engine.optimizer is engine.basic_optimizer:
        clip = import_deepspeed().runtime.utils.clip_grad_norm_

        def clip_and_keep() -> None:
            engine._global_grad_norm = clip(
                engine.module.parameters(), engine.gradient_clipping(), mpu=engine.mpu
            )

        engine.clip_fp32_gradients = clip_and_keep


@contextmanager
def _ignore_import_warnings() -> Iterator[None]:
    """Ignore the warnings of DeepSpeed's imports about themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def sequence_groups(library: ModuleType, ctx: DistContext) -> SimpleNamespace | None:
    """What DeepSpeed calls an mpu, if sequences are split over the mesh's `context` axis.

    Without one, DeepSpeed 0.19 reduces gradients over the data ranks only, and the ranks of one
    sequence diverge.

    Effects:
        Opens a group of this rank alone.
    """
    sequence = ctx.axis("context")
    if sequence.world_size == 1:
        return None
    # The group of all ranks, over which gradients are reduced and ZeRO shards.
    everyone = library.utils.groups._clone_world_group()
    alone = open_by_members([ctx.rank], timeout=timedelta(seconds=ctx.comm.timeout_s))
    answers = {
        # The ranks over which overflow is checked, and whose first rank saves.
        "data_parallel_group": everyone,
        "data_parallel_group_ranks": list(range(ctx.world_size)),
        "data_parallel_world_size": ctx.axis("data").world_size,
        "data_parallel_rank": ctx.rank,
        "sequence_parallel_group": sequence.comm.group,
        "sequence_parallel_world_size": sequence.world_size,
        "sequence_parallel_rank": sequence.rank,
        "sequence_data_parallel_group": everyone,
        "sequence_data_parallel_world_size": ctx.world_size,
        "sequence_data_parallel_rank": ctx.rank,
        "model_parallel_group": alone,
        "model_parallel_world_size": 1,
        "model_parallel_rank": 0,
    }
    functions = {f"get_{name}": lambda each=each: each for name, each in answers.items()}
    return SimpleNamespace(ctx=ctx, **functions)


def _ranks_of(group: Any) -> tuple[int, ...]:
    """The ranks of a process group; none if it is None or was destroyed."""
    try:
        return () if group is None else tuple(dist.get_process_group_ranks(group))
    except KeyError:
        return ()


def release_groups(library: ModuleType, ctx: DistContext) -> None:
    """Remove from DeepSpeed the groups that engines of another plan, mesh or context left there.

    It keeps one set per process and never replaces them: a later engine would use old ones.
    """
    groups = library.utils.groups
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None  # engines keep their own
    if getattr(groups.mpu, "ctx", ctx) is not ctx:
        groups.mpu = None
    if _ranks_of(groups._TENSOR_MODEL_PARALLEL_GROUP) == ctx.axis("tensor").comm.ranks:
        return
    groups._TENSOR_MODEL_PARALLEL_GROUP = groups._MODEL_PARALLEL_GROUP = None
    groups._DATA_PARALLEL_GROUP = None
    if groups.mpu is groups:
        groups.mpu = None
