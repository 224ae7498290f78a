"""Gradients in place: plain tensors, or DTensors over one mesh or several.

torch's functions for a list of gradients take plain tensors only, or DTensors of a single mesh, and
with a loss scale they reduce over the first mesh only. Here each rank works on its local tensors,
and results are reduced over exactly the axes along which gradients are sharded.

A micro-batch of which a rank has no row runs the model for the other ranks' sake. Its rows are
placeholders, and what a model computes from them may be infinite or NaN. A factor of zero in the
loss does not help: zero times infinity is NaN. So their gradients are replaced by zeros where they
reach a parameter, before a strategy adds or reduces them, and buffers, such as running statistics,
are as before afterwards.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from fxtrain import ops
from fxtrain.state import Batch, DistContext, Wrapped


def is_distributed(parameters: Any) -> bool:
    """Whether any of these parameters is a DTensor."""
    return bool([p for p in parameters if hasattr(p, "device_mesh")])


def local_grads(parameters: Any) -> list[Tensor]:
    """The local tensor of each gradient that exists; writing to it writes to the gradient."""
    return [getattr(grad, "_local_tensor", grad) for grad in _as_parameters_laid_out(parameters)]


def total_norm(
    model: Wrapped,
    parameters: Any,
    copies: frozenset[int] = frozenset(),
    norm_type: float = 2.0,
) -> Tensor:
    """The norm over gradients of a model, each entry counted once; equal on every rank.

    Args:
        parameters: Whose gradients count, of this rank.
        copies: Ids of parameters that another pipeline rank counts.
        norm_type: The p of the p-norm, above 0; infinity for the largest absolute value.

    Effects:
        One all-reduce of a number per mesh axis along which gradients are sharded, and one over
        the pipeline axis if there is one.
    """
    by_groups: dict[tuple[str, ...], tuple[list[Any], list[Tensor]]] = {}
    for grad in _as_parameters_laid_out(p for p in parameters if id(p) not in copies):
        groups = _groups_of(grad)
        key = tuple(group.group_name for group in groups)
        by_groups.setdefault(key, (groups, []))[1].append(getattr(grad, "_local_tensor", grad))
    largest = math.isinf(norm_type)
    reduction: Any = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    total = torch.zeros((), device=model.ctx.device)
    for groups, parts in by_groups.values():
        # Replicas along the other axes are equal, and are counted once by not being summed.
        power = _power_of_norm(parts, norm_type, model.ctx.device)
        for group in groups:
            dist.all_reduce(power, op=reduction, group=group)
        total = torch.maximum(total, power) if largest else total + power
    stages = model.ctx.axis("pipeline")
    if stages.world_size > 1:
        # A stage may have no gradient, or another dtype than the others.
        total = total.to(model.window.sums.dtype)
        dist.all_reduce(total, op=reduction, group=stages.comm.group)
    if largest:
        return total
    return total.sqrt() if norm_type == 2 else total ** (1 / norm_type)


def average_grads(grads: list[Tensor], ranks: DistContext) -> None:
    """Average gradients over ranks, in place."""
    for grad, mean in zip(grads, ops.reduce(grads, ranks, op="mean"), strict=True):
        grad.copy_(mean)


def scale_local(parts: list[Tensor], factor: Any) -> None:
    """Multiply in place."""
    for (dtype, device), alike in _by_dtype_and_device(parts).items():
        by = factor.to(dtype=dtype, device=device) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(alike, by)


def clamp_local(parts: list[Tensor], limit: float) -> None:
    """Clamp entries to ±`limit` in place."""
    for alike in _by_dtype_and_device(parts).values():
        torch._foreach_clamp_min_(alike, -limit)
        torch._foreach_clamp_max_(alike, limit)


def unscale_local(parts: list[Tensor], inverse: Tensor) -> Tensor:
    """Multiply in place by the inverse loss scale; 1 if this rank has an inf or nan, else 0."""
    nonfinite = torch.zeros((), device=inverse.device)
    for (_, device), alike in _by_dtype_and_device(parts).items():
        flag = nonfinite.to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(alike, flag, inverse.to(device))
        nonfinite = torch.maximum(nonfinite, flag.to(nonfinite.device))
    return nonfinite


def _as_parameters_laid_out(parameters: Any) -> list[Any]:
    """Gradients with the placements of their parameters: torch leaves some as partial sums."""
    gradients: list[Any] = []
    for parameter in parameters:
        grad = parameter.grad
        if grad is None:
            continue
        if hasattr(grad, "device_mesh") and grad.placements != parameter.placements:
            parameter.grad = grad = grad.redistribute(placements=parameter.placements)
        gradients.append(grad)
    return gradients


def _groups_of(grad: Any) -> list[Any]:
    """The process groups over which a gradient is sharded."""
    mesh = getattr(grad, "device_mesh", None)
    if mesh is None:
        return []
    axes = [dim for dim, how in enumerate(grad.placements) if not how.is_replicate()]
    return [mesh.get_group(dim) for dim in axes if mesh.size(dim) > 1]


def _power_of_norm(parts: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """What is summed over ranks: the sum of powers, or the maximum."""
    norm = nn.utils.get_total_norm(parts, norm_type).to(device)
    # In half precision, sums of powers over many ranks would round.
    norm = norm.float() if norm.dtype in (torch.float16, torch.bfloat16) else norm
    return norm if math.isinf(norm_type) else norm**norm_type


def _by_dtype_and_device(
    parts: list[Tensor],
) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for part in parts:
        groups.setdefault((part.dtype, part.device), []).append(part)
    return groups


def has_no_row(model: Wrapped, batch: Batch) -> bool:
    """Whether this rank runs a batch for the other ranks' sake."""
    return not batch.sizes[model.ctx.axis("data").rank]


@contextmanager
def uncounted(modules: Sequence[nn.Module]) -> Iterator[Callable[[], None]]:
    """A block in which all gradients of modules are zero, and which leaves their buffers unchanged.

    Yields:
        () → None, to be called after a forward and before its backward: FSDP makes the parameters
        that receive gradients in its first forward.
    """
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]
    handles: dict[int, Any] = {}

    def drop_gradients() -> None:
        for parameter in itertools.chain.from_iterable(map(_receiving, modules)):
            if parameter.requires_grad and id(parameter) not in handles:
                handles[id(parameter)] = parameter.register_hook(torch.zeros_like)

    drop_gradients()
    try:
        yield drop_gradients
    finally:
        for handle in handles.values():
            handle.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _receiving(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that receive gradients: parameters, and what FSDP gathers of them."""
    yield from module.parameters()
    part: Any
    for part in module.modules():
        for parameter in fsdp_parameters(part):
            if hasattr(parameter, "_unsharded_param"):  # gathered before
                yield parameter._unsharded_param


def fsdp_parameters(part: Any) -> Iterator[Any]:
    """torch's records of the parameters that FSDP shards in a module, without its children's."""
    if hasattr(part, "_get_fsdp_state"):
        state = part._get_fsdp_state()
        several = hasattr(state, "_fsdp_param_groups")  # since torch 2.13
        for group in state._fsdp_param_groups if several else [state._fsdp_param_group]:
            yield from () if group is None else group.fsdp_params
