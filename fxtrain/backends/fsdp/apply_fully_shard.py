"""torch's fully_shard, applied to a module as a plan says, and undone.

With experts, tokens travel to the ranks that hold theirs. The ranks of a replica form groups of
`FSDP(expert=...)` ranks. Each rank of a group has its own tokens and some of the experts of every
mixture. An all-to-all sends each token to the ranks of its experts, which compute with the module's
own forward, and a second one returns the outputs. No token is dropped. Ranks of different groups
hold the same experts, sharded between them by fully_shard.
"""

import fnmatch
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from fxtrain import _extensions
from fxtrain.backends.core.device_mesh import (
    DistributedParameters,
    device_mesh,
    distribute_parameter,
    hide_local,
    show_local,
)
from fxtrain.backends.core.initial_values import fill_sharded, record_initial_values
from fxtrain.backends.core.module_changes import prepare_module, send_values
from fxtrain.backends.core.step_functions import average_grads, local_grads
from fxtrain.backends.tensor import count_routes, is_mixture, split_layers
from fxtrain.ops.block_names import block_names
from fxtrain.ops.placeholders import fsdp_groups, runs_placeholders
from fxtrain.ops.step_parts import DTYPES
from fxtrain.ops.whole_tensors import full_values
from fxtrain.state import FSDP, DistContext, Float8, ModelStatus, Plan


def shard_size(ctx: DistContext, config: FSDP) -> int:
    """Ranks that together hold one replica of the model."""
    if config.mode == "none":
        return 1
    if config.shard is not None:
        return config.shard
    sizes = ctx.mesh.sizes
    # A replica is sharded over the context axis too, whose ranks would otherwise each hold one.
    return sizes["shard"] * sizes["context"] if sizes["shard"] > 1 else ctx.axis("loss").world_size


def ignored_parameters(module: nn.Module, config: FSDP) -> set[str]:
    """All names of the parameters that match a pattern, including the other names of tied ones.

    And of those without a dimension, such as a logit scale, or without values, which torch does
    not shard.
    """
    named = list(module.named_parameters(remove_duplicate=False))
    ignored = {
        id(parameter)
        for name, parameter in named
        if not (parameter.ndim and parameter.numel())
        or any(fnmatch.fnmatchcase(name, pattern) for pattern in config.ignore)
    }
    return {name for name, parameter in named if id(parameter) in ignored}


def units(module: nn.Module, config: FSDP) -> list[nn.Module]:
    """Submodules to shard, children before parents and without the root.

    A parameter belongs to one unit: what several of them share is left to the modules around them.
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
    chosen = [part for part in chosen if part is not module and _runs(part)]
    while tied := _tied(module, chosen):
        chosen = [part for part in chosen if id(part) not in tied]
    return chosen


def mixed_units(module: nn.Module, config: FSDP) -> list[str]:
    """Complex parameters in units that have real ones too, which torch cannot shard together."""
    ignored, seen, found = ignored_parameters(module, config), set[int](), list[str]()
    for unit in [*units(module, config), module]:
        prefix = next(
            f"{path}." if path else "" for path, part in module.named_modules() if part is unit
        )
        inside = {
            f"{prefix}{name}": parameter
            for name, parameter in unit.named_parameters()
            if id(parameter) not in seen and f"{prefix}{name}" not in ignored
        }
        seen.update(map(id, inside.values()))
        complex_names = [name for name, parameter in inside.items() if parameter.is_complex()]
        if len(complex_names) < len(inside):
            found += complex_names
    return found


def _tied(module: nn.Module, chosen: list[nn.Module]) -> set[int]:
    """Ids of the units with a parameter that another unit, or the rest of the module, has too."""
    inside = {id(part) for part in chosen}
    units_of: dict[int, set[int]] = {}

    def visit(part: nn.Module, unit: int) -> None:
        unit = id(part) if id(part) in inside else unit
        for parameter in part.parameters(recurse=False):
            units_of.setdefault(id(parameter), set()).add(unit)
        for child in part.children():
            visit(child, unit)

    visit(module, id(module))
    return {unit for held in units_of.values() if len(held) > 1 for unit in held} & inside


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


def shard_module(
    module: nn.Module, ctx: DistContext, plan: Plan, size: int, status: ModelStatus
) -> Callable[[], None]:
    """Shard a module over replicas of `size` ranks each, of the data and context axes.

    Args:
        module: The user's module.
        ctx: The context.
        plan: The plan.
        size: Ranks of a replica.
        status: Of the handle of the module: where hooks find the micro-batch that runs.

    Effects:
        Replaces parameters by their shards and adds torch's hooks, in place.

    Returns:
        A function that gathers full parameters, on all ranks at once, and puts them back.
    """
    config: FSDP = plan.strategy
    start = record_initial_values(module, ctx)
    mesh = device_mesh(ctx, size)
    if (float8 := gathered_in_float8(plan)) is not None:
        _extensions.gather_in_float8(module, float8)
    if config.tensor is not None:
        split_layers(module, mesh["tensor"], config.tensor)
    if plan.context is not None:
        _extensions.expose_positions(module, ctx, plan)
    prepare_module(module, plan, ctx, hooked=True)
    averages: list[Any] = []
    if ctx.axis("loss").world_size > 1:
        spread = None if config.expert is None else device_mesh(ctx, size, config.expert)
        _apply(module, mesh, spread, ctx, plan, status)
        replica = ctx.axis("loss" if plan.local is None else "shard")
        averages = _average_ignored(module, replica)
    fill_sharded(module, start, ctx, offload=config.offload, seed=plan.seed)
    send_values(_extensions.companions(module), ctx)

    def undo() -> None:
        for handle in averages:
            handle.remove()
        for part, name, parameter in _gathered(module, ctx.device):
            part._parameters[name] = parameter
        for part in module.modules():
            _composable_state._module_state_mapping.pop(part, None)

    return undo


def _apply(
    module: nn.Module,
    mesh: DeviceMesh,
    spread: DeviceMesh | None,
    ctx: DistContext,
    plan: Plan,
    status: ModelStatus,
) -> None:
    names = ignored_parameters(module, plan.strategy)
    named = dict(module.named_parameters(remove_duplicate=False))
    ignored = {named[name] for name in names}
    for parameter in ignored:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(ctx.device)
    parts = units(module, plan.strategy)
    if spread is not None:
        experts = list(expert_modules(module).values())
        parts = [unit for unit in parts if all(unit is not expert for expert in experts)]
        for part in experts:
            if not shard_experts(part, spread, ctx, _options(spread, None, ctx, plan), status):
                ignored.update(part.parameters())
    shard_parts(module, parts, ignored, mesh, ctx, plan)
    if gathered_in_float8(plan) is not None:
        scale_before_forward(module)


def shard_parts(
    module: nn.Module,
    parts: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    mesh: DeviceMesh,
    ctx: DistContext,
    plan: Plan,
) -> None:
    """Shard some parts of a module, each as a unit, and then the rest of it."""
    config: FSDP = plan.strategy
    options = _options(mesh, ignored, ctx, plan)
    for unit in parts:
        fully_shard(unit, **options)
    fully_shard(module, **options)
    _prefetch([module, *reversed(parts)], config)
    if config.unused_parameters:
        root: Any = module
        root.set_reduce_scatter_unused_params(True)


def _average_ignored(module: nn.Module, ranks: DistContext) -> list[Any]:
    """Average the gradients of ignored parameters, which torch leaves to the user.

    At the end of each backward in which torch reduces the others: in loops by hand too.

    Returns:
        The hooks, to be removed.
    """
    # Those of layers split over the tensor axis are DTensors, which the data ranks do not shard.
    apart = (None, ("tensor",))
    axes = [
        (p, p.device_mesh.mesh_dim_names if isinstance(p, DTensor) else None)
        for p in module.parameters()
    ]
    numbers = (p for p, names in axes if names in apart)
    ignored = [p for p in numbers if p.is_floating_point() or p.is_complex()]
    shards = [shard for part in module.modules() for shard in fsdp_groups(part)]
    arrived: list[Tensor] = []

    def average() -> None:
        if arrived:  # else an earlier call in this backward has averaged all of them
            arrived.clear()
            average_grads(local_grads(ignored), ranks)

    def arrives(parameter: Tensor) -> None:
        if all([shard.reduce_grads for shard in shards]):
            arrived.append(parameter)
            torch.autograd.Variable._execution_engine.queue_callback(average)

    handles: list[Any] = []
    for parameter in ignored:
        trained = parameter.requires_grad
        # torch takes hooks of parameters that require a gradient, as a frozen one may later.
        handles.append(parameter.requires_grad_().register_post_accumulate_grad_hook(arrives))
        parameter.requires_grad_(trained)
    return handles


def _options(
    mesh: DeviceMesh, ignored: set[nn.Parameter] | None, ctx: DistContext, plan: Plan
) -> dict[str, Any]:
    """Arguments of fully_shard."""
    config: FSDP = plan.strategy
    # An independent replica is sharded over its own ranks only.
    wanted = ("shard",) if plan.local is not None else ("replicate", "shard")
    axes = tuple(axis for axis in wanted if axis in (mesh.mesh_dim_names or ()))
    offload = OffloadPolicy()
    if config.offload:
        offload = CPUOffloadPolicy(pin_memory=config.pin and ctx.device.type != "cpu")
    return {
        "mesh": mesh[axes],
        "reshard_after_forward": None if config.mode == "full" else False,
        "mp_policy": gather_precision(plan),
        "offload_policy": offload,
        "ignored_params": ignored or None,
    }


def gather_precision(plan: Plan) -> MixedPrecisionPolicy:
    """The dtypes in which parameters are gathered and gradients are reduced."""
    config: FSDP = plan.strategy
    named = plan.precision.dtype if config.param_dtype == "plan" else config.param_dtype
    if plan.precision.compute == "fp32" and config.param_dtype == "plan":
        return MixedPrecisionPolicy(cast_forward_inputs=config.cast_inputs)
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[named],
        reduce_dtype=DTYPES[config.reduce_dtype],
        cast_forward_inputs=config.cast_inputs,
    )


def _prefetch(order: list[Any], config: FSDP) -> None:
    """Set which blocks to prefetch, assuming they run in the order of their definition."""
    for index, part in enumerate(order):
        if config.forward_prefetch:
            ahead = order[index + 1 : index + 1 + config.forward_prefetch]
            part.set_modules_to_forward_prefetch(ahead)
        if config.backward_prefetch:
            ahead = order[max(0, index - config.backward_prefetch) : index][::-1]
            part.set_modules_to_backward_prefetch(ahead)


def _gathered(module: nn.Module, device: torch.device) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Every name of a sharded parameter with its full value; tied names share one value."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    whole: dict[int, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                continue
            if id(parameter) not in whole:
                full = full_values(parameter).to(device)
                whole[id(parameter)] = nn.Parameter(full, requires_grad=parameter.requires_grad)
            places.append((part, name, whole[id(parameter)]))
    return places


def gathered_in_float8(plan: Plan) -> Float8 | None:
    """The recipe of a plan that gathers weights in float8."""
    recipe = plan.precision.recipe
    return recipe if isinstance(recipe, Float8) and recipe.gather == "fp8" else None


def scale_before_forward(module: nn.Module) -> None:
    """Compute the scales of all weights in one all-reduce before each forward.

    Without it, each weight needs an all-reduce of its own before it is gathered. torchao suggests
    to do this after each optimizer step, but restored and averaged weights need new scales too.

    Effects:
        Adds a hook to the module, before torch's own.
    """
    compute = importlib.import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp

    scale: Any = torch.compiler.disable(compute)  # type: ignore[no-untyped-call]

    def before(*_: Any) -> None:
        scale(module)

    module.register_forward_pre_hook(before, prepend=True)


def expert_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The mixtures of experts in a module, by name."""
    return {name: part for name, part in module.named_modules() if is_mixture(part)}


def expert_problems(ctx: DistContext, config: FSDP, module: nn.Module, replica: int) -> list[str]:
    """Problems with spreading the experts of a module over ranks.

    Args:
        replica: Ranks that hold one replica.
    """
    n, asked = config.expert, f"FSDP(expert={config.expert})"
    if n is None or ctx.world_size == 1:
        return []
    problems: list[str] = []
    if config.tensor is not None or ctx.mesh.context > 1 or config.mode == "none":
        problems.append(
            f"{asked} cannot be combined with tensor or context parallelism, nor with mode='none'. "
            f"To split experts over the tensor axis, use fx.Style(style='expert')."
        )
    if replica % n:
        return [
            *problems,
            f"{asked} needs replicas of a multiple of {n} ranks, but one has {replica}. Use a "
            f"divisor of {replica}.",
        ]
    mixtures = expert_modules(module)
    if not mixtures:
        problems.append(
            f"{asked}: {type(module).__name__} has no mixture of experts. One is a module that has "
            f"the stacked weights of all its experts, their number as num_experts, and takes "
            f"(tokens, experts of each, weights of those). Omit expert."
        )
    for name, part in mixtures.items():
        count: Any = part.num_experts
        outer = max(replica // n, 1)
        if count % n:
            problems.append(
                f"{asked}: {name} has {count} experts, which {n} ranks do not divide. Use a "
                f"divisor of {count}."
            )
        elif any(_shard_dim(p, count // n, outer) is None for p in part.parameters(recurse=False)):
            problems.append(
                f"{asked}: the other {outer} ranks of a replica divide neither the {count // n} "
                f"experts of a rank in {name} nor their second dimension. Use expert={replica}."
            )
    return problems


def _shard_dim(parameter: Tensor, here: int, outer: int) -> int | None:
    """The dimension that the ranks with the same experts shard, evenly."""
    if here % outer == 0:
        return 0
    return 1 if parameter.ndim > 1 and parameter.shape[1] % outer == 0 else None


def shard_experts(
    part: nn.Module,
    mesh: DeviceMesh,
    ctx: DistContext,
    options: Mapping[str, Any],
    status: ModelStatus,
) -> bool:
    """Give each rank its experts of a mixture, and shard those over the ranks that hold the same.

    Args:
        mesh: Of the axes replicate (if there are replicas), shard and expert.
        options: Of fully_shard.
        status: Where the hooks find the micro-batch that runs.

    Returns:
        Whether fully_shard holds them. Where no other rank holds the same ones, and they compute in
        their own dtype, it would only copy parameters and gradients.

    Effects:
        Replaces parameters by DTensors, and adds hooks that send tokens and outputs.
    """
    group = mesh["expert"]
    count: Any = part.num_experts
    here, outer = count // group.size(), mesh["shard"].size()
    names = [name for name, _ in part.named_parameters(recurse=False)]
    distributed: DistributedParameters = {}
    for name in names:
        distribute_parameter(part, name, group, Shard(0), distributed)
    _add_hooks(part, names, group, here, ctx, status)
    offloaded = isinstance(options["offload_policy"], CPUOffloadPolicy)
    if options["mesh"].size() == 1 and options["mp_policy"].param_dtype is None and not offloaded:
        return False
    fully_shard(
        part,
        shard_placement_fn=lambda parameter: Shard(_shard_dim(parameter, here, outer) or 0),
        **options,
    )
    return True


def _add_hooks(
    part: nn.Module,
    names: Sequence[str],
    mesh: DeviceMesh,
    here: int,
    ctx: DistContext,
    status: ModelStatus,
) -> None:
    signature, group = inspect.signature(part.forward), mesh.get_group()
    count: Any = part.num_experts
    open_forwards: list[tuple[Tensor, list[int], list[int], Tensor, torch.dtype]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        tokens, index, weights, *rest = signature.bind(*args, **kwargs).args
        show_local(module, names)
        vars(module)["num_experts"] = here
        if runs_placeholders(status):  # of which other ranks' experts must get nothing
            index = index[:0]
        order = index.flatten().argsort(stable=True)
        sent, received, per_expert = _counts(index, here, group, ctx)
        open_forwards.append((order, sent, received, weights, tokens.dtype))
        rows = tokens[order // index.shape[1]]
        arrived = _AllToAll.apply(rows, sent, received, group, float(mesh.size()))
        local = torch.arange(here, device=index.device).repeat(mesh.size())
        local = local.repeat_interleave(per_expert, output_size=len(arrived))
        return (arrived, local[:, None], weights.new_ones(len(arrived), 1), *rest), {}

    def after(module: nn.Module, args: Any, _: Any, out: Any) -> Any:
        local = hide_local(module, names)
        vars(module)["num_experts"] = count
        if not open_forwards:
            return out
        order, sent, received, weights, dtype = open_forwards.pop()
        if not isinstance(out, Tensor):
            return out  # forward failed, and this hook was called to clean up
        if not len(out):  # backward runs the same collectives and reductions on all ranks
            out = out + sum([unused[:0].sum() for unused in (args[0], *local)])
        back = _AllToAll.apply(out, received, sent, group, 1 / mesh.size(), status)
        each = back.new_zeros(weights.numel(), *back.shape[1:]).index_copy(0, order, back)
        weighted = each.view(*weights.shape, -1) * weights[..., None]
        return weighted.to(dtype).sum(1)

    part.register_forward_pre_hook(before, with_kwargs=True)
    part.register_forward_hook(after, with_kwargs=True, always_call=True)


def _counts(
    index: Tensor, here: int, group: Any, ctx: DistContext
) -> tuple[list[int], list[int], Tensor]:
    """How many tokens go to each rank, how many arrive from it, and those by sender and expert."""
    ranks, flat = group.size(), index.flatten()
    simulated = ctx.comm.simulated
    size = ranks * here
    counts = flat.new_zeros(size) if simulated else count_routes(index, size)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    if simulated:  # as if all ranks and experts were used alike
        each = [len(flat) // ranks] * ranks
        each[-1] += len(flat) % ranks
        arriving = torch.zeros(ranks, here, dtype=torch.int64, device=index.device)
        arriving[:, 0] = torch.tensor(each, device=index.device)
        return each, each, arriving.flatten()
    sent, received = torch.stack([counts, arriving]).view(2, ranks, here).sum(2).tolist()
    return sent, received, arriving


class _AllToAll(torch.autograd.Function):
    """Rows sent to each rank of a group; backward returns gradients, times a factor.

    The factors of the two directions cancel for the gradients of tokens. They leave those of the
    experts divided by the ranks of the group, whose tokens they have seen: gradients are means
    over ranks, and fully_shard divides by the other ranks.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        state: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: Any,
        factor: float,
        status: ModelStatus | None = None,
    ) -> Tensor:
        state.sent, state.received, state.group, state.factor = sent, received, group, factor
        state.status = status
        return _sent(rows, sent, received, group)

    @staticmethod
    def backward(state: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if state.status is not None and runs_placeholders(state.status):
            grad = torch.zeros_like(grad)  # of outputs that this rank got before it said so
        back = _sent(grad, state.received, state.sent, state.group)
        return back * state.factor, None, None, None, None, None


def _sent(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group)
    return out
