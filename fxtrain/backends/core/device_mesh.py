"""The ranks as torch's DeviceMesh, over the process groups that the context has open."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, _redistribute, distribute_tensor

from fxtrain.ops.opening import open_by_members
from fxtrain.ops.separate_groups import separate_groups
from fxtrain.state import DistContext, Mesh
from fxtrain.state.mesh import AXES, axis_groups

# By id of a parameter, what replaced it: the same wherever the parameter occurs again.
DistributedParameters = dict[int, nn.Parameter]
_STAGE = "ranks of a stage"  # among the groups


class _Meshes(dict[tuple[Mesh, int, int], DeviceMesh]):
    """Meshes by that of the context, ranks that share a replica, and ranks that spread experts."""


class _Groups(dict[str, Any]):
    """Groups opened for models, by how they split the ranks."""


def device_mesh(ctx: DistContext, shard: int, expert: int = 1) -> DeviceMesh:
    """A mesh whose data ranks are split into replicas of `shard` ranks each.

    Axes of one rank are omitted, except `shard` if there are several data ranks. The axes of
    the context keep their groups. The ranks of the context axis count as data ranks.

    Args:
        shard: Ranks of one replica; divides the data ranks.
        expert: Ranks of a replica that hold different experts of a mixture. If there are several,
            they are the innermost axis `expert`, and the axis `shard` has the ranks of a replica
            that hold the same experts.

    Returns:
        The same mesh for every model of a context, so that torch's caches serve all of them.

    Effects:
        Opens the groups that the context lacks, on every rank: those of `replicate` and
        `shard` where the context's own mesh splits the data ranks differently.
    """
    from torch.distributed.tensor import debug  # imports torch.compile's packages, a second

    meshes = ctx.comm.slot(_Meshes)
    if (ctx.mesh, shard, expert) not in meshes:
        split = {axis: ctx.mesh.sizes[axis] for axis in AXES}
        data = split["replicate"] * split["shard"] * split["context"]
        split |= {"replicate": data // shard, "shard": shard // expert, "context": 1}
        split["expert"] = expert
        shown = {axis: n for axis, n in split.items() if n > 1 or (axis == "shard" and data > 1)}
        layout = torch.arange(math.prod(shown.values()), device="cpu").view(*shown.values())
        groups = [_group(ctx, axis, list(shown).index(axis), split, layout) for axis in shown]
        clear_sharding_caches()
        meshes[ctx.mesh, shard, expert] = DeviceMesh.from_group(
            groups, ctx.device.type, layout, mesh_dim_names=tuple(shown)
        )
        ctx.comm.state.at_close.append(clear_sharding_caches)
    elif not hasattr(debug, "_clear_sharding_prop_cache"):  # torch 2.9 fails on what it has cached
        clear_sharding_caches()
    return meshes[ctx.mesh, shard, expert]


@contextmanager
def separate_meshes(ctx: DistContext) -> Iterator[None]:
    """A block in whose other process groups models have meshes of their own; see `separate_groups`.

    Effects:
        Those of `separate_groups`.
    """
    slots = ctx.comm.state.slots
    kept = {kind: slots.pop(kind) for kind in (_Meshes, _Groups) if kind in slots}
    try:
        with separate_groups(ctx):
            yield
    finally:
        if slots.pop(_Meshes, None) is not None:
            clear_sharding_caches()
        slots.pop(_Groups, None)
        slots.update(kept)


def group_of_mesh(mesh: DeviceMesh, ctx: DistContext) -> Any:
    """A process group of all ranks of a mesh, in the mesh's order; see `open_stage_group`."""
    if mesh.ndim == 1:
        return mesh.get_group(0)
    ranks = tuple(mesh.mesh.flatten().tolist())
    for known in (ctx, ctx.axis("loss")):
        if known.comm.ranks == ranks:
            return known.comm.group
    return ctx.comm.slot(_Groups)[_STAGE]


def open_stage_group(ctx: DistContext) -> None:
    """Open a group of the ranks of one stage, if they are neither all ranks nor those of an axis.

    Effects:
        Every rank opens the groups of all stages: NCCL splits communicators on all ranks at once.
    """
    if ctx.mesh.pipeline > 1 and ctx.mesh.tensor > 1 and ctx.axis("loss").world_size > 1:
        ranks = axis_groups(ctx.mesh, ("replicate", "shard", "context", "tensor"))
        _opened(ctx, _STAGE, ranks)


def second_group(ctx: DistContext, axis: DistContext, axes: tuple[str, ...]) -> Any:
    """Another process group of the ranks of an axis, for collectives that last while others run.

    Those of one group run one after the other.

    Args:
        axis: Of the context.
        axes: The axes of its mesh that `axis` consists of.

    Effects:
        The first call opens it, on every rank at the same time. A part of the ranks, as a context
        of its own, keeps the group that it has, since all ranks would have to open another one.
    """
    if ctx.comm.name != "world":
        return axis.comm.group
    return _opened(ctx, f"second {axes}", axis_groups(ctx.mesh, axes))


def distribute_parameter(
    part: nn.Module, name: str, mesh: DeviceMesh, how: Placement, distributed: DistributedParameters
) -> None:
    """Replace a module's parameter by a DTensor.

    Args:
        distributed: Filled in. Its keys are ids of parameters that all existed before the first of
            them was replaced, so no id is reused.
    """
    whole = part.get_parameter(name)
    if id(whole) not in distributed:
        # Without a source rank: values are sent before, or after the model has its final form.
        local = distribute_tensor(whole.detach(), mesh, [how], src_data_rank=None)
        distributed[id(whole)] = nn.Parameter(local, requires_grad=whole.requires_grad)
    part.register_parameter(name, distributed[id(whole)])


def show_local(module: nn.Module, names: Iterable[str], **options: Any) -> None:
    """Have a module's forward find this rank's parts in place of some of its DTensors.

    Attribute lookup finds them before the parameters, which the module still owns.
    """
    for name in names:
        parameter: Any = module._parameters[name]
        vars(module)[name] = parameter.to_local(**options)


def hide_local(module: nn.Module, names: Iterable[str]) -> list[Tensor]:
    """Take back what `show_local` did, if anything, and return the parts."""
    shown = vars(module)
    return [shown.pop(name) for name in names if name in shown]


def clear_sharding_caches() -> None:
    """Clear torch's cache of layouts.

    torch caches them by the value of a mesh, and would reuse those of an equal mesh of an earlier
    context, whose groups may be closed.
    """
    from torch.distributed.tensor import debug

    clear = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
        return
    # Older torch has one cache per thread, so a separate one for backward: replace all of them.
    # It caches redistributions elsewhere.
    propagator = DTensor._op_dispatcher.sharding_propagator
    renewed = type(propagator.propagate_op_sharding)(propagator.propagate_op_sharding_non_cached)
    propagator.propagate_op_sharding = renewed
    _redistribute._gen_transform_infos.cache_clear()


def _group(
    ctx: DistContext, axis: str, dim: int, split: dict[str, int], layout: torch.Tensor
) -> Any:
    if split[axis] == ctx.world_size:
        return ctx.comm.group
    whole = split["expert"] == 1  # else replicas are split further, and `shard` is not innermost
    if whole and axis == "shard" and split["replicate"] == 1 and split["shard"] > 1:
        return ctx.axis("loss").comm.group
    own = ctx.mesh.context == 1 or axis not in ("replicate", "shard")
    if own and whole and split[axis] == ctx.mesh.sizes[axis] and split[axis] > 1:
        return ctx.axis(axis).comm.group
    return _opened(ctx, f"{axis}.{split}", layout.movedim(dim, -1).flatten(0, -2).tolist())


def _opened(ctx: DistContext, key: str, parts: list[list[int]]) -> Any:
    """This rank's group of a partition of the ranks; every rank opens the groups of all parts."""
    groups = ctx.comm.slot(_Groups)
    if key not in groups:  # several models share one
        wait = timedelta(seconds=ctx.comm.timeout_s)
        if max(map(len, parts)) == 1:
            groups[key] = open_by_members([ctx.rank], timeout=wait)
        else:
            backend = "fake" if ctx.comm.simulated else None
            groups[key], _ = dist.new_subgroups_by_enumeration(parts, timeout=wait, backend=backend)
        ctx.comm.state.opened_groups.append(groups[key])
    return groups[key]
