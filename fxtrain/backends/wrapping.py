"""A model under a plan, by the strategy that carries it out, and the module again."""

import math
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import attrs
from torch import nn
from torch.nn.parameter import is_lazy

from fxtrain import _extensions
from fxtrain.backends.core.module_changes import (
    accept_methods,
    model_signature,
    record_module,
    unmatched_names,
)
from fxtrain.backends.core.optimizers import (
    Optimizers,
    Params,
    Schedulers,
    as_factories,
)
from fxtrain.backends.core.weights import raise_to_fp32
from fxtrain.errors import MeshError, PlanError
from fxtrain.ops.logs import log
from fxtrain.ops.micro_batches import uses_cuda_graphs
from fxtrain.ops.optimizer_settings import plain_settings, settings_of
from fxtrain.ops.plan_agreement import agree_on_plan, plan_for
from fxtrain.ops.standing import Windows, wrapped_models
from fxtrain.ops.whole_tensors import plain_name
from fxtrain.state import (
    DistContext,
    FromConfig,
    Plan,
    Strategy,
    Wrapped,
)
from fxtrain.state.context import check_connected
from fxtrain.state.mesh import resolve_mesh
from fxtrain.state.registry import strategy_of
from fxtrain.state.wrapped import check_open

N = TypeVar("N", bound=nn.Module)
O = TypeVar("O", bound=Optimizers | FromConfig)  # noqa: E741


class _WrappedModules(weakref.WeakKeyDictionary[nn.Module, weakref.ref[Wrapped]]):
    """The handle of each module that was wrapped for a communicator, as its `slot`."""


def wrap(
    model: N,
    ctx: DistContext,
    plan: Plan | None = None,
    *,
    optimizer: Callable[[Params], O] | O | None = None,
    scheduler: Callable[[O], Schedulers] | Schedulers | FromConfig | None = None,
    strategy: Strategy | None = None,
) -> Wrapped[N]:
    """Make a model ready to train or run under a plan.

    Args:
        model: A module, on any device; the same on every rank except for its values, of which
            rank 0's are used.
        ctx: Where to run.
        plan: The settings; by default the plan of the launch, or else `fx.Plan()`.
        optimizer: Factory from parameters to an optimizer, or to several as a list or dict. It is
            called once the strategy is ready for it, with the parameters that require grad.
            `params.named()` returns them with their names. Or an optimizer, or several, built on
            the parameters of `model`: it keeps its groups and their options, and gets the
            parameters as the strategy holds them. Use None to only run the model.
        scheduler: Factory from what the optimizer factory returned to a scheduler or several; or
            a scheduler, or several, built on the optimizer that is passed.
        strategy: The functions that carry out the plan, such as an entry of `strategies()` with
            one function changed; by default the entry of the config `plan.strategy`.

    Effects:
        Moves the module to the context's device in place, and quantizes its frozen linear layers
        if the plan says so; unwrapping leaves those quantized. With an optimizer and mixed
        precision, trained parameters in half precision become fp32, until they are unwrapped
        (`Precision.params`). Compares plan and model between the ranks, in one exchange of packets,
        and the options of optimizers and schedulers, in another; a third one asks whether a model
        of replicas is on the meta device anywhere. Sends rank 0's values to the other ranks of the
        data axis. If it fails, the module is as before, except for its device.

    Raises:
        PlanError: the plan does not fit the model or the context, the module is wrapped already, or
            the ranks pass different plans; on every rank, before anything changes.
        CollectiveError: the ranks pass different models or options of optimizers and schedulers,
            such as learning rates, or only some pass an optimizer; on every rank.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     model = fx.wrap(torch.nn.Linear(2, 1), ctx,
        ...                     optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        ...     model(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """
    _check_types(model, ctx, plan, strategy)
    check_connected("wrap", ctx)
    plan = plan_for("wrap", ctx, plan, strategy)
    _refuse_constants(plan, trains=optimizer is not None)
    if ctx.world_size > 1:
        arguments = {
            "model": model_signature(model),
            "optimizer": "none" if optimizer is None else "given",
            "scheduler": "none" if scheduler is None else "given",
            "strategy": "the plan's" if strategy is None else strategy.name,
        }
        agree_on_plan("wrap", ctx, plan, arguments)
    strategy = strategy_of(plan.strategy) if strategy is None else strategy
    if problems := problems_of(strategy, ctx, plan, model):
        raise PlanError("\n".join(problems), code="FX202")
    special = _may_have_special_layers(plan) or strategy.take_layers is not None
    if special and optimizer is not None and (problem := _extensions.gradient_problem(model)):
        raise PlanError(f"wrap(optimizer=...): {problem}", code="FX202")
    optimizer, scheduler = as_factories(optimizer, scheduler, model)
    trains = optimizer is not None
    planned = _extensions.layers_as_planned if special else _unchanged
    with planned(model, ctx, plan, strategy, trains=trains):
        changes_since = record_module(model)
        dtypes = {
            plain_name(name): tensor.dtype
            for named in (model.named_parameters, model.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
        lower = _raised(model, ctx, plan, strategy) if trains else lambda: None
        try:
            accept_methods(model, plan)
            if plan.precision.recipe is not None:
                _extensions.convert_as_planned(model, ctx, plan)
            wrapped: Any = strategy.wrap(strategy, model, ctx, plan, optimizer, scheduler)
        except BaseException:
            changes_since()[0]()
            lower()
            raise
    revert, hide = changes_since()
    _warn_of_fp16(ctx, plan)
    steps = (wrapped.undo, revert, lower)

    def undo() -> None:
        for step in steps:
            step()

    _compare_options(ctx, plan, wrapped, undo)
    wrapped = attrs.evolve(wrapped, undo=undo, hide_changes=hide, dtypes=dtypes)
    _register(ctx, model, wrapped)
    return wrapped


def _register(ctx: DistContext, model: nn.Module, wrapped: Wrapped) -> None:
    """Make a model known to later calls, to the records of where ranks stand, and to a dry run."""
    ctx.comm.slot(_WrappedModules)[model] = weakref.ref(wrapped)
    ctx.comm.slot(Windows).add(wrapped.window)
    if (models := wrapped_models.get()) is not None:
        models.append(weakref.ref(wrapped))


def _unchanged(*_: Any, **__: Any) -> AbstractContextManager[None]:
    """In place of `layers_as_planned`, for a model of plain layers."""
    return nullcontext()


def _raised(
    model: nn.Module, ctx: DistContext, plan: Plan, strategy: Strategy
) -> Callable[[], None]:
    """Convert parameters to fp32 where plan and strategy say so; returns the undo."""
    raises = plan.precision.params != "keep" and strategy.raises_parameters(plan)
    return raise_to_fp32(model, ctx) if raises else lambda: None


def _warn_of_fp16(ctx: DistContext, plan: Plan) -> None:
    if plan.precision.compute == "fp16" and ctx.device.type == "cpu":
        log(ctx, "fxtrain.plan").warning(
            'Plan(precision="fp16") on a CPU: CPUs compute bf16 faster, and it needs no loss '
            'scale. Use precision="bf16".'
        )


def unwrap(model: Wrapped[N]) -> N:
    """Return the user's module, without the changes of wrapping. Call it at the end of training.

    Every rank gets full weights. The handle is closed: a step, a call, a save or an export of it
    is an error. During training, use `fx.weights` or `fx.gathered`, which do not change it.

    Effects:
        Gathers sharded tensors; all ranks must call this. Gradients of an open accumulation window
        are dropped. With independent replicas (`Plan.local`), each rank gets its own: call
        `ops.average(model)` first to average them.

    Raises:
        PlanError: the model was unwrapped already, or is inside `fx.gathered`.

    Example:
        >>> import fxtrain as fx, torch
        >>> net = torch.nn.Linear(2, 1)
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.unwrap(fx.wrap(net, ctx)) is net
        True
    """
    check_open(model, "unwrap", PlanError)
    module: Any = model.strategy.unwrap(model)
    if model.window.micro:
        for parameter in module.parameters():
            parameter.grad = None
    model.status.closed = "unwrap"
    return module


def _compare_options(ctx: DistContext, plan: Plan, wrapped: Any, undo: Callable[[], None]) -> None:
    """Keep the options of optimizers and schedulers; undo wrapping if other ranks have others."""
    status = wrapped.status
    status.script_settings = settings_of(wrapped.optimizers, wrapped.scheduler)
    status.settings = plain_settings(status.script_settings)
    if wrapped.optimizers and ctx.world_size > 1:
        # Stages of a pipeline may have groups of their own.
        among = ctx if ctx.mesh.pipeline == 1 else ctx.axis("data")
        try:
            agree_on_plan("wrap", among, plan, status.settings)
        except BaseException:
            undo()
            raise


def problems_of(
    strategy: Strategy, ctx: DistContext, plan: Plan, module: nn.Module
) -> tuple[str, ...]:
    """Why a plan cannot be carried out in a context; no traffic, the same on all ranks."""
    if mismatch := _mesh_problems(ctx, plan) or _row_problems(strategy, plan):
        return mismatch
    if lazy := _lazy_problems(module):
        return lazy
    problems = [*unmatched_names(module, plan), *strategy.check(ctx, plan, module)]
    if plan.context is not None and ctx.world_size > 1 and not strategy.cuts_sequences:
        problems.append(
            f"{strategy.name} cannot split sequences, as Plan(context=...) asks. Remove context, "
            f"or use FSDP() or DDP()."
        )
    if plan.accumulate > 1 and uses_cuda_graphs(ctx, plan):
        problems.append(
            f"Plan(accumulate={plan.accumulate}) adds gradients to those of the last micro-batch, "
            f"which a CUDA graph of {plan.compile} overwrites (PyTorch issue 169545). Use "
            f'Compile(mode="max-autotune-no-cudagraphs"), or accumulate=1.'
        )
    if plan.verify_replicas and strategy.verify is None:
        problems.append(
            f"Plan(verify_replicas={plan.verify_replicas}): {strategy.name} has no replicas in "
            f"memory that ranks could compare. Remove verify_replicas, or use DDP(), FSDP() or "
            f"PP()."
        )
    if plan.frozen == "digests" and not (strategy.full_parameters or strategy.splits_quantized):
        problems.append(
            f"Plan(frozen='digests') needs full parameters, and {strategy.name} may hold parts of "
            f"them."
        )
    if _may_have_special_layers(plan):
        problems += _extensions.layer_problems(strategy, ctx, plan, module)
    if plan.local is not None:
        problems += _extensions.local_problems(strategy, ctx, plan)
    return tuple(problems)


def _may_have_special_layers(plan: Plan) -> bool:
    """Whether a model may have quantized layers, or get layers that compute in float8.

    Without a library of such layers in this process, no model has them.
    """
    asked = plan.quantize is not None or plan.precision.recipe is not None
    return asked or not {"bitsandbytes", "torchao"}.isdisjoint(sys.modules)


def _lazy_problems(module: nn.Module) -> tuple[str, ...]:
    """Parameters and buffers that get their shapes in a first forward."""
    lazy = [
        f"{path or 'the model'} ({type(part).__name__})"
        for path, part in module.named_modules()
        for tensor in (*part._parameters.values(), *part._buffers.values())
        if tensor is not None and is_lazy(tensor)
    ]
    if not lazy:
        return ()
    return (
        f"wrap: parameters of {', '.join(dict.fromkeys(lazy))} get their shapes in a first "
        f"forward, and strategies and optimizers need them before. Run the model once on one "
        f"batch, without gradients, before fx.wrap.",
    )


def _mesh_problems(ctx: DistContext, plan: Plan) -> tuple[str, ...]:
    """What differs between the mesh of a plan and that of the context."""
    if plan.mesh is None:
        return ()
    try:
        planned = resolve_mesh(plan.mesh, math.prod(ctx.mesh.sizes.values()))
    except MeshError as error:
        return (error.message,)
    if planned == ctx.mesh:
        return ()
    return (
        f"wrap: the plan has {planned}, but this context has {ctx.mesh}. Use "
        f"fx.detect(mesh=plan.mesh), or start the script with fxtrain launch --mesh.",
    )


def _row_problems(strategy: Strategy, plan: Plan) -> tuple[str, ...]:
    """What is wrong with an entry itself, or with its use for a plan."""
    if type(plan.strategy) is not strategy.config:
        kind = strategy.config.__name__
        return (
            f"wrap(strategy={strategy.name}) carries out a {kind}, but the plan has "
            f"strategy={plan.strategy!r}. Use Plan(strategy={kind}(...)), or omit strategy.",
        )
    return tuple(
        f"{strategy.name} has its own {name}, which would never be called: its run or apply does "
        f"that work itself. Change that function too, and remove {name!r} from `fused`."
        for name, function in strategy.fused
        if getattr(strategy, name) is not function
    )


def _refuse_constants(plan: Plan, *, trains: bool) -> None:
    if trains and plan.compile is not None and plan.compile.prepack:
        raise PlanError(
            "wrap(optimizer=...) with Plan(compile=fx.Compile(prepack=True)): prepacked weights "
            "are constants, and an update would not reach them. Leave prepack out for training, "
            "or wrap the model without an optimizer."
        )


def _check_types(model: Any, ctx: Any, plan: Any, strategy: Any) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise PlanError(
            f"wrap: the model is inside torch's {type(model).__name__}, which fx.wrap takes the "
            f"place of. Pass model.module."
        )
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"wrap takes a torch.nn.Module, found {type(model).__name__}. For example: "
            f"fx.wrap(net, ctx, plan)."
        )
    if not isinstance(ctx, DistContext):
        raise PlanError(
            f"wrap: ctx is a {type(ctx).__name__}, not a context. Use fx.wrap(net, fx.detect())."
        )
    if not isinstance(plan, Plan | None):
        raise PlanError(f"wrap: plan is a {type(plan).__name__}, not a Plan. Use fx.Plan(...).")
    if not isinstance(strategy, Strategy | None):
        raise PlanError(
            f"wrap(strategy=...) takes a Strategy record, found {type(strategy).__name__}. Put a "
            f"config such as fx.FSDP() into the plan: fx.Plan(strategy=fx.FSDP())."
        )
    _refuse_second_handle(model, ctx)


def _refuse_second_handle(model: nn.Module, ctx: DistContext) -> None:
    """Refuse a module that is wrapped already, has a part that is, or is a part of one that is."""
    known = ctx.comm.slot(_WrappedModules)
    handles = [handle for each in list(known.values()) if (handle := each()) is not None]
    for handle in handles:
        if handle.status.closed in ("unwrap", "release"):
            continue
        inside = next((path for path, part in model.named_modules() if part is handle.module), None)
        around = next((path for path, part in handle.module.named_modules() if part is model), None)
        if inside is None and around is None:
            continue
        names = type(model).__name__, type(handle.module).__name__
        found = f"this {names[0]} is wrapped already"
        if inside:
            found = f"{inside} of this {names[0]}, a {names[1]}, is wrapped already"
        elif around:
            found = f"this {names[0]} is {around} of a {names[1]} that is wrapped already"
        raise PlanError(
            f"wrap: {found}, and the two handles would change the same parameters. Use the first "
            f"one, or call fx.unwrap on it before."
        )
