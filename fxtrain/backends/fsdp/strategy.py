"""Parameters sharded over ranks, by torch's fully_shard (FSDP2)."""

import fnmatch
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import attrs
from torch import nn
from torch.distributed.fsdp import FSDPModule

from fxtrain.backends.context.split_sequences import sequence_problems
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.gradients import average_grads
from fxtrain.backends.core.initial_values import apply_with_buffers
from fxtrain.backends.core.local_sgd import average, independent_replicas
from fxtrain.backends.core.module_changes import (
    unknown_classes,
    unknown_patterns,
    unmatched_names,
    xla_problems,
)
from fxtrain.backends.single import SINGLE, make_handle, wrap_without_engine
from fxtrain.backends.tensor import split_problems
from fxtrain.models.block_names import block_names
from fxtrain.ops.same_errors import fail_together
from fxtrain.precision.quantizing import hold_as_parameters
from fxtrain.state import FSDP, DistContext, Plan, Strategy, Wrapped

# Whether the caller is inside `loss_on_parts`.
_ON_PARTS = ContextVar("fxtrain.loss_on_parts", default=False)


def _check(ctx: DistContext, plan: Plan, module: nn.Module) -> tuple[str, ...]:
    config: FSDP = plan.strategy
    problems = [*unmatched_names(module, plan), *xla_problems(ctx, "FSDP")]
    if ctx.mesh.pipeline > 1:
        problems.append(
            f"The mesh has pipeline={ctx.mesh.pipeline}, which FSDP does not use: these ranks "
            f"would all compute the same. Use PP(stages=fx.FSDP(...)), or omit the axis from "
            f"fx.Mesh(...)."
        )
    problems += sequence_problems(ctx, plan, module)
    problems += sharding_problems(ctx, config, module)
    if config.expert is not None and plan.local is not None:
        problems.append(
            f"FSDP(expert={config.expert}) cannot be combined with Plan(local=...): experts are "
            f"shared by ranks. Remove one of them."
        )
    if config.expert is not None and not problems:
        from fxtrain.backends.fsdp.experts import expert_problems

        problems += expert_problems(ctx, config, module, shard_size(ctx, config))
    return tuple(problems)


def sharding_problems(ctx: DistContext, config: FSDP, module: nn.Module) -> list[str]:
    """Problems with how a config splits a model over the data and tensor axes."""
    problems = [*_unit_problems(module, config), *_size_problems(ctx, config)]
    problems += _tensor_problems(ctx, config)
    if config.tensor is not None and ctx.world_size > 1:
        problems += split_problems(module, config.tensor, ctx.mesh.tensor)
    if config.unused_parameters and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        problems.append("FSDP(unused_parameters=True) needs a newer torch. Use DDP() for that.")
    if config.offload and ctx.axis("loss").world_size == 1:
        problems.append(
            "FSDP(offload=True) moves shards to host memory, but this context has one data rank "
            "and nothing is sharded. Launch two processes, or omit offload."
        )
    return problems


def _unit_problems(module: nn.Module, config: FSDP) -> list[str]:
    """Problems with names in a config that match nothing, and with what cannot be sharded."""
    problems = unknown_classes(module, config.wrap, field="FSDP(wrap=...)")
    ways = [name for name in ("wrap", "min_params", "wrap_by") if getattr(config, name)]
    if len(ways) > 1:
        problems.append(f"FSDP({', '.join(ways)}) chooses blocks in several ways. Keep one.")
    if config.wrap_by is not None:
        try:
            pkgutil.resolve_name(config.wrap_by)
        except (ImportError, AttributeError, ValueError) as error:
            problems.append(
                f"FSDP(wrap_by={config.wrap_by!r}): {error}. Name a function that every rank can "
                f"import, as 'package.module:function'."
            )
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    problems += unknown_patterns(config.ignore, names, field="FSDP(ignore=...)")
    ignored = ignored_names(module, config)
    sparse = [
        name
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
        and part.sparse
        and part.weight.requires_grad
        and f"{name}.weight" not in ignored
    ]
    if sparse:
        problems.append(
            f"FSDP cannot reduce sparse gradients, which {', '.join(sparse[:5])} compute with "
            f"sparse=True. Set sparse=False, or use DDP()."
        )
    return problems


def ignored_names(module: nn.Module, config: FSDP) -> set[str]:
    """All names of the parameters that match a pattern, including the other names of tied ones."""
    named = list(module.named_parameters(remove_duplicate=False))
    ignored = {
        id(parameter)
        for name, parameter in named
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.ignore)
    }
    return {name for name, parameter in named if id(parameter) in ignored}


def units(module: nn.Module, config: FSDP) -> list[list[nn.Module]]:
    """Submodules to shard, children before parents and without the root.

    Modules that share a parameter are in one list, since a parameter belongs to one unit.
    """
    if config.min_params is not None:
        chosen = _by_size(module, config.min_params)
    elif config.wrap_by is not None:
        chooses = pkgutil.resolve_name(config.wrap_by)
        chosen = [part for name, part in module.named_modules() if name and chooses(name, part)]
        chosen = chosen[::-1]
    else:
        names = config.wrap or block_names(module)
        chosen = [part for part in [*module.modules()][::-1] if type(part).__name__ in names]
    return _tied_together(module, [part for part in chosen if part is not module and _runs(part)])


def _runs(part: nn.Module) -> bool:
    """Whether torch can hook a module's forward, and it contains something to shard."""
    container = isinstance(part, nn.ModuleList | nn.ModuleDict)
    return not container and any(True for _ in part.parameters())


def _by_size(module: nn.Module, least: int) -> list[nn.Module]:
    """The smallest modules with this many parameters outside smaller such modules."""
    chosen: list[nn.Module] = []
    seen: set[int] = set()

    def visit(part: nn.Module) -> int:
        # Its forward reads the weights of its child without calling the child.
        whole = isinstance(part, nn.MultiheadAttention)
        own = {id(p): p.numel() for p in part.parameters(recurse=whole) if id(p) not in seen}
        seen.update(own)
        rest = sum(own.values()) + sum(visit(child) for child in part.children() if not whole)
        if rest >= least and _runs(part):
            chosen.append(part)
            return 0
        return rest

    visit(module)
    return chosen


def _tied_together(module: nn.Module, chosen: list[nn.Module]) -> list[list[nn.Module]]:
    unit_of = _unit_of_parameters(module, chosen)
    group: dict[int, list[nn.Module]] = {id(part): [part] for part in chosen}
    for holders in unit_of.values():
        if len(holders) == 1:
            continue
        if any(part is module for part in holders) or _nested(holders):
            # Shared with an outer module: left to the enclosing unit.
            for part in holders:
                group.pop(id(part), None)
            continue
        tied = {id(each): each for part in holders for each in group.get(id(part), ())}
        merged = list(tied.values())
        for part in merged:
            group[id(part)] = merged
    lists = {id(parts): parts for parts in group.values()}
    return list(lists.values())


def _unit_of_parameters(module: nn.Module, chosen: list[nn.Module]) -> dict[int, list[nn.Module]]:
    """For each parameter, the units (or the root) that own it."""
    own = {id(part) for part in chosen}
    units_of: dict[int, list[nn.Module]] = {}

    def visit(part: nn.Module, unit: nn.Module) -> None:
        unit = part if id(part) in own else unit
        for parameter in part.parameters(recurse=False):
            holders = units_of.setdefault(id(parameter), [])
            if all(unit is not each for each in holders):
                holders.append(unit)
        for child in part.children():
            visit(child, unit)

    visit(module, module)
    return units_of


def _nested(parts: list[nn.Module]) -> bool:
    return any(
        a is not b and any(a is inside for inside in b.modules()) for a in parts for b in parts
    )


def _tensor_problems(ctx: DistContext, config: FSDP) -> list[str]:
    sizes = ctx.mesh.sizes
    problems: list[str] = []
    if config.tensor is None and sizes["tensor"] > 1:
        problems.append(
            f"The mesh has tensor={sizes['tensor']}, but the plan does not say what to split over "
            f"it. Use FSDP(tensor=fx.TP(...)), or omit the axis from fx.Mesh(...)."
        )
    if config.tensor is not None and sizes["tensor"] == 1 and ctx.world_size > 1:
        problems.append(
            "FSDP(tensor=...) splits layers over the mesh's tensor axis, which has one rank. "
            "Use more: fx.detect(mesh=fx.Mesh(tensor=2)), or fxtrain launch --mesh tensor=2."
        )
    return problems


def _size_problems(ctx: DistContext, config: FSDP) -> list[str]:
    ranks, shard = ctx.axis("loss").world_size, config.shard
    if config.mode == "none" and shard not in (None, 1):
        return [
            f"FSDP(mode='none', shard={shard}): mode 'none' shards nothing. Remove one of them."
        ]
    if shard is None or ranks == 1:
        return []
    if ranks % shard:
        fits = [str(n) for n in range(2, ranks + 1) if ranks % n == 0]
        return [
            f"FSDP(shard={shard}) needs a multiple of {shard} ranks, but this context has {ranks}. "
            f"Use shard={' or '.join(fits)}, or launch {-(-ranks // shard) * shard} processes."
        ]
    if ctx.mesh.shard > 1 and shard != ctx.mesh.shard * ctx.mesh.context:
        return [
            f"FSDP(shard={shard}) and Mesh(shard={ctx.mesh.shard}, context={ctx.mesh.context}) "
            f"disagree. Remove one of them."
        ]
    return []


def shard_size(ctx: DistContext, config: FSDP) -> int:
    """Ranks that together hold one replica of the model."""
    if config.mode == "none":
        return 1
    if config.shard is not None:
        return config.shard
    sizes = ctx.mesh.sizes
    # A replica is sharded over the context axis too, whose ranks would otherwise each hold one.
    return sizes["shard"] * sizes["context"] if sizes["shard"] > 1 else ctx.axis("loss").world_size


def _wrap(
    strategy: Strategy,
    module: nn.Module,
    ctx: DistContext,
    plan: Plan,
    optimizer: Any,
    scheduler: Any,
) -> Wrapped:
    # Importing torch's part takes half a second, and other plans do not need it.
    if ctx.axis("loss").world_size == ctx.mesh.tensor == 1:
        return wrap_without_engine(strategy, module, ctx, plan, optimizer, scheduler)
    from fxtrain.backends.fsdp.apply_fully_shard import shard_module

    size = shard_size(ctx, plan.strategy)
    put_back = hold_as_parameters(module, ctx.device)
    try:
        gather = shard_module(module, ctx, plan, size)
    except BaseException:
        put_back()
        raise

    def undo() -> None:
        gather()
        put_back()

    with undone_together(undo, ctx):
        model = make_handle(strategy, module, ctx, plan, optimizer, scheduler, undo=undo)
    return independent_replicas(model, size)


@contextmanager
def undone_together(undo: Callable[[], None], ctx: DistContext) -> Iterator[None]:
    """A block after which, if it fails on a rank, all of them gather the parameters again.

    Raises:
        Exception: this rank's own.
        CollectiveError: another rank's failed.
    """
    try:
        with fail_together(ctx):
            yield
    except Exception:
        if ctx.comm.state.failure is None:  # otherwise a rank is gone
            undo()
        raise


def _sync(model: Wrapped, enabled: bool) -> AbstractContextManager[None]:  # noqa: FBT001
    inner = _sync_data(model, enabled=enabled)
    return loss_on_parts(inner) if splits_logits(model.ctx, model.plan.strategy) else inner


def splits_logits(ctx: DistContext, config: FSDP | None) -> bool:
    """Whether the loss function gets sharded logits, which cross-entropy must handle."""
    tensor = None if config is None else config.tensor
    return tensor is not None and tensor.loss and ctx.mesh.tensor > 1


@contextmanager
def loss_on_parts(inner: AbstractContextManager[None]) -> Iterator[None]:
    """The region of forward and backward in which cross-entropy accepts sharded logits.

    Regions nest, as where `fx.update` is called inside `ops.sync`; torch's end with the inner one.
    """
    from torch.distributed.tensor.parallel import loss_parallel

    if _ON_PARTS.get():
        with inner:
            yield
        return
    token = _ON_PARTS.set(True)
    try:
        with inner, loss_parallel():
            yield
    finally:
        _ON_PARTS.reset(token)


def _sync_data(model: Wrapped, *, enabled: bool) -> AbstractContextManager[None]:
    module: Any = model.module
    if not hasattr(module, "set_requires_gradient_sync"):
        return nullcontext()
    if not enabled:
        return _unreduced(module)
    return _reduce_ignored(model) if model.plan.strategy.ignore else nullcontext()


@contextmanager
def _unreduced(module: Any) -> Iterator[None]:
    # A persistent flag, which is read in backward.
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


@contextmanager
def _reduce_ignored(model: Wrapped) -> Iterator[None]:
    """Average the gradients of ignored parameters, which torch leaves to the user."""
    yield
    grads = [
        parameter.grad
        for parameter in model.module.parameters()
        if parameter.grad is not None and not hasattr(parameter, "device_mesh")
    ]
    average_grads(grads, model.ctx.axis("loss"))


def _generate(model: Wrapped, method: Any, args: Any, kwargs: Any) -> Any:
    inner = attrs.evolve(model, module=method, engine=method)
    return step_functions.forward(inner, args, {"synced_gpus": True, **kwargs})


FSDP_STRATEGY: Strategy = attrs.evolve(
    SINGLE,
    name="FSDP",
    config=FSDP,
    full_parameters=False,
    splits_quantized=True,
    updates_on_host=False,
    verifies_replicas=True,
    generate=_generate,
    check=_check,
    wrap=_wrap,
    sync=_sync,
    apply=apply_with_buffers,
    cuts_sequences=True,
    average=average,
)
