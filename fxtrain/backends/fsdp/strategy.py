"""Parameters sharded over ranks, by torch's fully_shard (FSDP2)."""

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fxtrain import _extensions, _tree
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.initial_values import apply_with_buffers
from fxtrain.backends.core.module_changes import (
    unknown_classes,
    unknown_patterns,
    unused_axes,
    xla_problems,
)
from fxtrain.backends.fsdp.apply_fully_shard import (
    expert_problems,
    ignored_parameters,
    mixed_units,
    shard_module,
    shard_size,
)
from fxtrain.backends.single import SINGLE, make_handle, wrap_without_engine
from fxtrain.backends.tensor import split_problems
from fxtrain.errors import StepError
from fxtrain.ops.same_errors import fail_together
from fxtrain.state import FSDP, DistContext, Mesh, MicroBatch, ModelStatus, Plan, Strategy, Wrapped


def _check(ctx: DistContext, plan: Plan, module: nn.Module) -> tuple[str, ...]:
    config: FSDP = plan.strategy
    problems = [*xla_problems(ctx, "FSDP"), *unused_axes(ctx, "FSDP", ("pipeline",))]
    if plan.context is not None or ctx.mesh.context > 1:
        problems += _extensions.sequence_problems(ctx, plan, module)
    problems += sharding_problems(ctx, config, module)
    if config.expert is not None and plan.local is not None:
        problems.append(
            f"FSDP(expert={config.expert}) cannot be combined with Plan(local=...): experts are "
            f"shared by ranks. Remove one of them."
        )
    if plan.local is not None and ctx.world_size > 1:
        problems += _local_problems(ctx, config, type(plan.local).__name__)
    if config.expert is not None and not problems:
        problems += expert_problems(ctx, config, module, shard_size(ctx, config))
    return tuple(problems)


def _local_problems(ctx: DistContext, config: FSDP, name: str) -> list[str]:
    ranks, shard = ctx.axis("data").world_size, ctx.mesh.shard
    if ranks < ctx.world_size:
        return []  # refused under every strategy
    if config.mode != "none" and shard not in (1, ranks) and config.shard in (None, shard):
        return []
    return [
        f"Plan(local={name}(...)) with FSDP averages over the mesh's replicate axis, and "
        f"shards each replica over its shard axis; both need several ranks, but the mesh has "
        f"replicate={ctx.mesh.replicate} and shard={shard}. Use fx.detect(mesh=fx.Mesh("
        f"shard=...)) or fxtrain launch --mesh shard=..., or DDP()."
    ]


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
    ignored = ignored_parameters(module, config)
    mixed = [] if problems else mixed_units(module, config)
    if mixed:
        problems.append(
            f"FSDP shards the parameters of a unit in one dtype, and the complex "
            f"{', '.join(mixed[:5])} are in units with real ones. Use FSDP(ignore=...) with their "
            f"names, which leaves them unsharded, or DDP()."
        )
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


def _tensor_problems(ctx: DistContext, config: FSDP) -> list[str]:
    if config.tensor is None:
        return unused_axes(ctx, "FSDP without tensor=", ("tensor",))
    if ctx.mesh.tensor == 1 and ctx.world_size > 1:
        return [
            "FSDP(tensor=...) splits layers over the mesh's tensor axis, which has one rank. "
            "Use more: fx.detect(mesh=fx.Mesh(tensor=2)), or fxtrain launch --mesh tensor=2."
        ]
    return []


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


def _wrap(
    strategy: Strategy,
    module: nn.Module,
    ctx: DistContext,
    plan: Plan,
    optimizer: Any,
    scheduler: Any,
) -> Wrapped:
    if ctx.axis("loss").world_size == ctx.mesh.tensor == 1:
        return wrap_without_engine(strategy, module, ctx, plan, optimizer, scheduler)
    size, status = shard_size(ctx, plan.strategy), ModelStatus()
    with ExitStack() as undo:
        undo.callback(_extensions.hold_as_parameters(module, ctx.device))
        undo.callback(shard_module(module, ctx, plan, size, status))
        undo = undo.pop_all()
    with undone_together(undo.close, ctx):
        model = make_handle(
            strategy, module, ctx, plan, optimizer, scheduler, undo=undo.close, status=status
        )
    return _extensions.independent_replicas(model, size)


@contextmanager
def undone_together(undo: Callable[[], None], ctx: DistContext) -> Iterator[None]:
    """A block of `fail_together` after whose failure all ranks gather the parameters again."""
    try:
        with fail_together(ctx):
            yield
    except Exception:
        if ctx.comm.state.failure is None:  # otherwise a rank is gone
            undo()
        raise


def _forward(model: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = step_functions.forward(model, args, kwargs)
    if torch.is_grad_enabled() and isinstance(model.module, FSDPModule):
        for leaf in _tree.flatten(out)[0]:
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(_refuse_higher_gradients)
    return out


def _refuse_higher_gradients(_: Tensor) -> None:
    if torch.is_grad_enabled():
        raise StepError(
            "FSDP frees gathered parameters after a backward, and reduces their gradients, so that "
            "it has no gradients of gradients: torch.autograd.grad(..., create_graph=True), as for "
            "a gradient penalty. Use DDP() for this model."
        )


def _sync(model: Wrapped, micro_batch: MicroBatch) -> AbstractContextManager[None]:
    module: Any = model.module
    sharded = hasattr(module, "set_requires_gradient_sync")
    inner = _unreduced(module) if sharded and not micro_batch.reduces else nullcontext()
    # A region inside another one would end both.
    begins = splits_logits(model.ctx, model.plan.strategy) and not micro_batch.nested
    return loss_on_parts(inner) if begins else inner


def splits_logits(ctx: DistContext, config: FSDP | None) -> bool:
    """Whether the loss function gets sharded logits, which cross-entropy must handle."""
    tensor = None if config is None else config.tensor
    return tensor is not None and tensor.loss and ctx.mesh.tensor > 1


@contextmanager
def loss_on_parts(inner: AbstractContextManager[None]) -> Iterator[None]:
    """The region of forward and backward in which cross-entropy accepts sharded logits."""
    from torch.distributed.tensor.parallel import loss_parallel

    with inner, loss_parallel():
        yield


@contextmanager
def _unreduced(module: Any) -> Iterator[None]:
    # A persistent flag, which is read in backward.
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _generate(model: Wrapped, method: Any, args: Any, kwargs: Any) -> Any:
    inner = attrs.evolve(model, module=method, engine=method)
    axis, alone = model.ctx.axis("tensor"), step_functions.NOTHING
    same = step_functions.same_text(model, axis, args, kwargs) if axis.world_size > 1 else alone
    with same:
        return step_functions.forward(inner, args, {"synced_gpus": True, **kwargs})


def raises_parameters(plan: Plan) -> bool:
    """Whether forward computes in another dtype than parameters have, by plan or by config."""
    return plan.precision.compute != "fp32" or plan.strategy.param_dtype in ("bf16", "fp16")


def shards(plan: Plan, mesh: Mesh) -> tuple[int, int]:
    """Over how many ranks a config splits parameters, and over how many optimizer states."""
    config: FSDP = plan.strategy
    if config.mode == "none":
        return 1, 1
    data = mesh.replicate * mesh.shard * mesh.context
    size = config.shard or (mesh.shard * mesh.context if mesh.shard > 1 else data)
    return size, size


def overlapped(plan: Plan) -> tuple[str, ...]:
    """Blocks are gathered while others compute; whole replicas reduce gradients in backward."""
    return ("backward",) if plan.strategy.mode == "none" else ("forward", "backward")


FSDP_STRATEGY: Strategy = attrs.evolve(
    SINGLE,
    name="FSDP",
    config=FSDP,
    raises_parameters=raises_parameters,
    shards=shards,
    in_host_memory=lambda plan: plan.strategy.offload,
    overlapped=overlapped,
    one_rank=False,
    waits_in_forward=True,
    gathers_weights=True,
    full_parameters=False,
    splits_quantized=True,
    updates_on_host=False,
    generate=_generate,
    check=_check,
    wrap=_wrap,
    forward=_forward,
    sync=_sync,
    apply=apply_with_buffers,
    cuts_sequences=True,
    average=_extensions.average_replicas,
)
