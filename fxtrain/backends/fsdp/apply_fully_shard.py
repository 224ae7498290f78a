"""torch's fully_shard, applied to a module as a plan says, and undone."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from fxtrain.backends.context.split_sequences import expose_positions
from fxtrain.backends.core.device_mesh import device_mesh
from fxtrain.backends.core.initial_values import fill_sharded, record_initial_values
from fxtrain.backends.core.module_changes import prepare_module, send_values
from fxtrain.backends.fsdp.experts import expert_modules, shard_experts
from fxtrain.backends.fsdp.strategy import ignored_names, units
from fxtrain.backends.tensor import split_layers
from fxtrain.ops.step_parts import DTYPES
from fxtrain.ops.whole_tensors import full_values
from fxtrain.precision.quantizing import companions
from fxtrain.precision.recipe_layers import gather_in_float8
from fxtrain.state import FSDP, DistContext, Float8, Plan


def shard_module(module: nn.Module, ctx: DistContext, plan: Plan, size: int) -> Callable[[], None]:
    """Shard a module over replicas of `size` ranks each, of the data and context axes.

    Effects:
        Replaces parameters by their shards and adds torch's hooks, in place.

    Returns:
        A function that gathers full parameters, on all ranks at once, and puts them back.
    """
    config: FSDP = plan.strategy
    start = record_initial_values(module, ctx)
    mesh = device_mesh(ctx, size)
    if (float8 := gathered_in_float8(plan)) is not None:
        gather_in_float8(module, float8)
    if config.tensor is not None:
        split_layers(module, mesh["tensor"], config.tensor)
    expose_positions(module, ctx, plan)
    prepare_module(module, plan, ctx, hooked=True)
    if ctx.axis("loss").world_size > 1:
        spread = None if config.expert is None else device_mesh(ctx, size, config.expert)
        _apply(module, mesh, spread, ctx, plan)
    fill_sharded(module, start, ctx, offload=config.offload, seed=plan.seed)
    send_values(companions(module), ctx)

    def undo() -> None:
        for part, name, parameter in _gathered(module, ctx.device):
            part._parameters[name] = parameter
        for part in module.modules():
            _composable_state._module_state_mapping.pop(part, None)

    return undo


def _apply(
    module: nn.Module, mesh: DeviceMesh, spread: DeviceMesh | None, ctx: DistContext, plan: Plan
) -> None:
    names = ignored_names(module, plan.strategy)
    named = dict(module.named_parameters(remove_duplicate=False))
    ignored = {named[name] for name in names}
    for parameter in ignored:
        if not parameter.is_meta:
            parameter.data = parameter.data.to(ctx.device)
    parts = units(module, plan.strategy)
    if spread is not None:
        experts = list(expert_modules(module).values())
        parts = [unit for unit in parts if all(unit[0] is not expert for expert in experts)]
        for part in experts:
            if not shard_experts(part, spread, ctx, _options(spread, None, ctx, plan)):
                ignored.update(part.parameters())
    shard_parts(module, parts, ignored, mesh, ctx, plan)
    if gathered_in_float8(plan) is not None:
        scale_before_forward(module)


def shard_parts(
    module: nn.Module,
    parts: Sequence[list[nn.Module]],
    ignored: set[nn.Parameter],
    mesh: DeviceMesh,
    ctx: DistContext,
    plan: Plan,
) -> None:
    """Shard some parts of a module, each as a unit, and then the rest of it.

    Args:
        ignored: Parameters that are not sharded.
    """
    config: FSDP = plan.strategy
    options = _options(mesh, ignored, ctx, plan)
    shards: list[Any] = []
    for unit in parts:
        fully_shard(unit if len(unit) > 1 else unit[0], **options)
        shards.append(unit[0])
    fully_shard(module, **options)
    _prefetch([module, *reversed(shards)], config)
    if config.unused_parameters:
        root: Any = module
        root.set_reduce_scatter_unused_params(True)


def _options(
    mesh: DeviceMesh, ignored: set[nn.Parameter] | None, ctx: DistContext, plan: Plan
) -> dict[str, Any]:
    """Arguments of fully_shard."""
    config: FSDP = plan.strategy
    # An independent replica is sharded over its own ranks only.
    wanted = ("shard",) if plan.local is not None else ("replicate", "shard")
    axes = tuple(axis for axis in wanted if axis in (mesh.mesh_dim_names or ()))
    return {
        "mesh": mesh[axes],
        "reshard_after_forward": None if config.mode == "full" else False,
        "mp_policy": gather_precision(plan),
        "offload_policy": _offload(config, ctx),
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


def _offload(config: FSDP, ctx: DistContext) -> OffloadPolicy:
    if not config.offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=config.pin and ctx.device.type != "cpu")


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
