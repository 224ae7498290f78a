"""Initial values of a sharded model, rank 0's or fresh ones; and buffers, equal on all replicas."""

import functools
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from fxtrain import ops
from fxtrain.backends.core import step_functions
from fxtrain.errors import PlanError
from fxtrain.ops.splitting import shard_box
from fxtrain.ops.transport.exchange import rank_loss_guard
from fxtrain.state import DistContext, UpdateResult, UpdateSpec, Wrapped

# On rank 0, full values of parameters by name. None if no rank has any: they come from the modules'
# own functions.
InitialValues = dict[str, Tensor] | None


def record_initial_values(module: nn.Module, ctx: DistContext) -> InitialValues:
    """Keep rank 0's values before the model is sharded.

    Raises:
        PlanError: a model is partly on the meta device, or only rank 0's is; or no rank has values
            and a module cannot initialize itself. On every rank.
    """
    tensors = [*module.parameters(), *module.buffers()]
    meta = sum(tensor.is_meta for tensor in tensors)
    counts = ops.gather_objects(meta, ctx)
    mixed = [rank for rank, count in enumerate(counts) if count not in (0, len(tensors))]
    if mixed or (counts[0] and not all(counts)):
        raise PlanError(
            f"wrap: of {len(tensors)} parameters and buffers, this many are on the meta device on "
            f"each rank: {dict(enumerate(counts))}. Build the whole model there on all ranks, or "
            f"on all but rank 0, whose values are sent to the others."
        )
    fresh = counts[0] > 0
    if fresh and (stuck := [path for path, _, functions in _initializers(module) if not functions]):
        raise PlanError(
            f"wrap: the model is on the meta device, and these modules have no reset_parameters "
            f"to initialize them: {', '.join(stuck[:10]) or 'the model itself'}. "
            f"Define it (empty, if fx.load_model fills the model next), or build the model "
            f"with values on rank 0, and on the meta device on the others."
        )
    if fresh:
        return None
    return {} if ctx.rank else {name: p.detach() for name, p in module.named_parameters()}


def fill_sharded(
    module: nn.Module, start: InitialValues, ctx: DistContext, *, offload: bool, seed: int
) -> None:
    """Initialize a sharded model.

    Effects:
        From rank 0's values: each rank receives one full parameter at a time. Fresh values: every
        rank computes the values of one module at a time from the plan's seed. It keeps its shards.
    """
    if any(tensor.device.type == "meta" for tensor in (*module.parameters(), *module.buffers())):
        module.to_empty(device=torch.device("cpu") if offload else ctx.device)
    if offload:
        for part in module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                persists = name not in part._non_persistent_buffers_set
                part.register_buffer(name, buffer.to(ctx.device), persists)
    _fill_materialized(module, start, ctx, seed)


def fill_replica(module: nn.Module, ctx: DistContext, *, seed: int) -> None:
    """Initialize a model that is whole on every rank, if any rank has it on the meta device."""
    meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    if ops.any_rank(meta, ctx):
        names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        fill_full(module, record_initial_values(module, ctx), ctx, keep=names, seed=seed)


def fill_full(
    module: nn.Module, start: InitialValues, ctx: DistContext, *, keep: Container[str], seed: int
) -> None:
    """Initialize a model whose tensors are full, but not all on this rank.

    Args:
        keep: Names of the parameters and buffers that this rank needs; they are moved to its
            device, and the others are left alone.
    """
    ready: dict[int, Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        for tensors in (part._parameters, part._buffers):
            for key, tensor in tensors.items():
                # Every stage also computes with some buffers of others, such as frequencies.
                needed = tensors is part._buffers or (f"{path}.{key}" if path else key) in keep
                if tensor is not None and needed:
                    if id(tensor) not in ready:
                        ready[id(tensor)] = _materialized(tensor, ctx)
                    tensors[key] = ready[id(tensor)]  # pyright: ignore[reportArgumentType]
    _fill_materialized(module, start, ctx, seed)


def _fill_materialized(
    module: nn.Module, start: InitialValues, ctx: DistContext, seed: int
) -> None:
    """Fill the allocated tensors of a module: from the seed, or from rank 0."""
    if start is None:
        with ops.fork_rng(ctx), torch.no_grad():
            ops.seed(seed, ctx)
            _reset(module, ctx)
        return
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            _send(start.get(name), parameter, ctx)
        buffers = list(module.buffers())
        for buffer, sent in zip(buffers, ops.broadcast(buffers, ctx), strict=True):
            buffer.copy_(sent)


def _materialized(tensor: Tensor, ctx: DistContext) -> Tensor:
    """The tensor on the device; a new one if it was on the meta device."""
    if not tensor.is_meta:
        tensor.data = tensor.data.to(ctx.device)
        return tensor
    empty = torch.empty_like(tensor, device=ctx.device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def _send(whole: Tensor | None, parameter: Tensor, ctx: DistContext) -> None:
    if whole is None:
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=ctx.device)
    else:
        full = whole.to(ctx.device).contiguous()
    dist.broadcast(full, 0, group=ctx.comm.group)
    copy_shard(full, parameter)


def _initializers(module: nn.Module) -> Iterator[tuple[str, nn.Module, list[Callable[[], Any]]]]:
    """Each module with tensors of its own, and the functions that initialize it, in their order.

    As in their constructors: a module's own function, then `_init_weights`, over a single module,
    of the model of transformers around it, which leaves modules that it does not know alone.
    """
    around: dict[str, Any] = {}
    for path, part in module.named_modules():
        model = around.get(path.rpartition(".")[0])
        around[path] = part if callable(getattr(part, "_init_weights", None)) else model
        if not [*part.parameters(recurse=False), *part.buffers(recurse=False)]:
            continue
        own = (getattr(part, name, None) for name in ("reset_parameters", "_reset_parameters"))
        functions: list[Callable[[], Any]] = [f for f in own if callable(f)][:1]
        if (model := around[path]) is not None:
            functions.append(functools.partial(model._init_weights, part))
        yield path, part, functions


def _reset(module: nn.Module, ctx: DistContext) -> None:
    done: set[int] = set()
    for _, part, functions in _initializers(module):
        parameters = {name: p for name, p in part._parameters.items() if p is not None}
        for name, parameter in parameters.items():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=ctx.device)
            part._parameters[name] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        for function in functions:
            function()
        for name, parameter in parameters.items():
            whole = part._parameters[name]
            assert whole is not None
            part._parameters[name] = parameter
            if id(parameter) not in done:
                done.add(id(parameter))
                copy_shard(whole, parameter)


def copy_shard(whole: Tensor, parameter: Tensor) -> None:
    """Copy this rank's shard from the full tensor."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    mesh = parameter.device_mesh
    place = [mesh.get_local_rank(dim) for dim in range(mesh.ndim)]
    start, shape = shard_box(whole.shape, mesh.shape, place, parameter.placements)
    for dim, (first, length) in enumerate(zip(start, shape, strict=True)):
        whole = whole.narrow(dim, first, length)
    parameter.to_local().copy_(whole)


def apply_with_buffers(model: Wrapped, update: UpdateSpec) -> UpdateResult:
    """An update on torch's own machinery; before it, replicas get the same buffers."""
    send_buffers(model)
    return step_functions.apply(model, update)


def send_buffers(model: Wrapped) -> None:
    """Send the first replica's buffers to all, in place; independent replicas keep their own.

    Buffers that no state_dict contains are skipped: forward only reads them.

    Effects:
        One broadcast per dtype of the buffers, if there are any and several ranks.
    """
    replica = model.status.replica
    ranks = model.ctx.axis("loss") if replica is None else replica.within
    if ranks.world_size == 1:
        return
    buffers = {
        id(buffer): buffer.detach()
        for part in model.module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
        and name not in part._non_persistent_buffers_set
        and not hasattr(buffer, "device_mesh")
    }
    with rank_loss_guard(ranks, ("step", "buffers")):
        step_functions.broadcast_tensors(buffers.values(), ranks)
