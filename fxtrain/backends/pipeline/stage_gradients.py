"""Gradients of a pipeline: sums over stages that share a parameter, means over replicas, norms."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain import ops
from fxtrain.backends.core import step_functions
from fxtrain.backends.core.gradients import local_grads
from fxtrain.backends.pipeline.partition import Partition
from fxtrain.state import DistContext, Wrapped
from fxtrain.state.mesh import axis_groups


def open_shared_groups(
    names: Iterable[str], partition: Partition, ctx: DistContext
) -> tuple[tuple[tuple[Any, tuple[str, ...]], ...], list[Any]]:
    """The groups of ranks that hold the same parameters.

    Args:
        names: Of the parameters, in an order that all ranks share.

    Returns:
        (group, names) of this rank, and the groups that were opened for it.

    Effects:
        Every rank opens all groups that the context lacks.
    """
    axis = ctx.axis("pipeline")
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name in names:
        if len(partition.holders(name)) > 1:
            by_ranks.setdefault(partition.holders(name), []).append(name)
    sums: list[tuple[Any, tuple[str, ...]]] = []
    opened: list[Any] = []
    for ranks, shared in sorted(by_ranks.items()):
        group = axis.comm.group
        if len(ranks) < axis.world_size:
            lines = axis_groups(ctx.mesh, ("pipeline",))
            group, _ = dist.new_subgroups_by_enumeration(
                [[line[rank] for rank in ranks] for line in lines]
            )
            if axis.rank in ranks:
                opened.append(group)
        if axis.rank in ranks:
            sums.append((group, tuple(shared)))
    return tuple(sums), opened


def reduce_grads(model: Wrapped) -> None:
    """Reduce the gradients of a closing window.

    Effects:
        One all-reduce per dtype for parameters shared by the same ranks, and one over the data
        axis for parameters that are not sharded along it. A parameter that several stages share and
        none uses gets a zero gradient.
    """
    named = dict(model.module.named_parameters(remove_duplicate=False))
    for group, names in model.engine.shared_groups:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for name in names:
            parameter = named[name]
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # Ranks that differ in the pipeline axis alone hold the same part of it.
            by_dtype.setdefault(parameter.dtype, []).extend(local_grads([parameter]))
        for grads in by_dtype.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat, group=group)
            for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(part.view_as(grad))
    data = model.ctx.axis("data")
    if data.world_size > 1:
        grads = local_grads(p for p in model.module.parameters() if not _is_sharded(p))
        for grad, mean in zip(grads, ops.reduce(grads, data, op="mean"), strict=True):
            grad.copy_(mean)


def _is_sharded(parameter: Any) -> bool:
    """Whether torch's FSDP manages it, and so averages its gradients itself."""
    mesh = getattr(parameter, "device_mesh", None)
    return mesh is not None and not {"replicate", "shard"}.isdisjoint(mesh.mesh_dim_names)


def clip_norm(model: Wrapped, max_norm: float, **options: Any) -> Tensor:
    """Clip by the norm over all stages, each parameter counted once."""
    engine = model.engine
    if engine is model.module:
        return step_functions.clip_norm(model, max_norm, **options)
    copies = frozenset(
        id(parameter)
        for name, parameter in model.module.named_parameters()
        if engine.partition.holders(name)[0] != engine.axis.rank
    )
    return step_functions.clip_norm(model, max_norm, copies, **options)
