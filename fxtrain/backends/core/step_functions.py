"""Forward, backward and update, shared by every strategy on torch's own modules.

Gradients are changed in place, and are plain tensors, or DTensors over one mesh or several. torch's
functions for a list of gradients take plain tensors only, or DTensors of a single mesh, and with a
loss scale they reduce over the first mesh only. Here each rank works on its local tensors, and
results are reduced over exactly the axes along which gradients are sharded.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from fxtrain import _tree, ops
from fxtrain.errors import StepError
from fxtrain.ops import autocast
from fxtrain.ops.placeholders import uncounted
from fxtrain.ops.transport.pace import Pace
from fxtrain.ops.whole_tensors import local_part
from fxtrain.state import (
    AccumulationWindow,
    Batch,
    DistContext,
    MicroBatch,
    Plan,
    UpdateResult,
    UpdateSpec,
    WeightedLoss,
    Wrapped,
)

NOTHING = nullcontext()  # a block that does nothing, which may be entered many times


@contextmanager
def same_text(
    model: Wrapped, axis: DistContext, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Let the ranks of an axis compute one text: from equal arguments, and with one seed.

    Effects:
        Compares arguments that are tensors, numbers or text; sends a seed from the first rank.

    Raises:
        CollectiveError: the arguments differ; on every rank.
    """
    named = {**dict(enumerate(args)), **kwargs}
    config: Any = kwargs.get("generation_config")
    if hasattr(config, "to_dict"):
        named["generation_config"] = config.to_dict()
    plain = Tensor | int | float | str | None
    compared = {
        name: [leaf for leaf in _tree.flatten(value)[0] if isinstance(leaf, plain)]
        for name, value in named.items()
    }
    ops.agree(compared, axis, name="the arguments of generate")
    seed = ops.broadcast_object(int(torch.randint(1 << 62, (), device="cpu")), axis)
    with ops.fork_rng(model.ctx, seed):
        yield


def forward(model: Wrapped, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the engine in the plan's precision.

    Without gradients, no engine of torch's waits for other ranks, so that one rank may evaluate
    while the others do something else.
    """
    precision, device = model.plan.precision, model.ctx.device.type
    if precision.compute != "fp32":
        with autocast(model):
            out = model.engine(*args, **kwargs)
    elif torch.is_autocast_enabled(device):  # by the region of another model
        with torch.autocast(device, enabled=False):
            out = model.engine(*args, **kwargs)
    else:  # a region that does nothing would take three calls in every step
        out = model.engine(*args, **kwargs)
    if model.plan.accumulate > 1:
        refuse_backward_of_others(out, model)
    return _tree.map_leaves(to_float, out) if precision.output == "fp32" else out


def refuse_backward_of_others(out: Any, model: Wrapped) -> None:
    """Have the backward of another model's loss fail inside this one's accumulation window.

    The loss of a generator that calls its discriminator leaves gradients in both. Those in the
    discriminator are dropped when its next window begins, but would be added to one that is open.

    Args:
        out: What forward returned; only tensors that `_tree.flatten` finds are watched.
    """
    status = model.status
    if status.running is not None or not torch.is_grad_enabled():
        return
    if not any(parameter.requires_grad for parameter in model.module.parameters()):
        return

    def begins(_: Tensor) -> None:
        # With create_graph=True it computes a term of a loss, such as a gradient penalty.
        if status.running is not None or not model.window.micro or torch.is_grad_enabled():
            return
        name = type(model.module).__name__
        raise StepError(
            f"The backward of another model's loss reached this {name} inside an accumulation "
            f"window, after {model.window.micro} of {model.plan.accumulate} micro-batches, and "
            f"would add its gradients to those of the window. Train the models in turns of whole "
            f"windows, or use Plan(accumulate=1) for this one."
        )

    for leaf in _tree.flatten(out)[0]:
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(begins)


def no_sync(model: Wrapped, micro_batch: MicroBatch) -> AbstractContextManager[None]:
    """Do nothing: there is nothing to reduce, so all micro-batches are alike."""
    return NOTHING


def backward(loss: Tensor, model: Wrapped) -> None:
    """Run backward, of the scaled loss under fp16."""
    if model.scaler is not None:
        loss = model.scaler.scale(loss)
    loss.backward()


def begin(model: Wrapped) -> None:
    """Drop the gradients of the last window, or those that another model has left since."""
    for optimizer in model.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = None
    for parameter in model.status.others:
        parameter.grad = None


def run(
    model: Wrapped,
    micro_batch: MicroBatch,
    compute_loss: Callable[[Wrapped, Batch], WeightedLoss],
) -> WeightedLoss:
    """Forward, loss, backward."""
    strategy, batch = model.strategy, micro_batch.batch
    with strategy.sync(model, micro_batch):
        if micro_batch.has_rows:
            weighted = compute_loss(model, batch)
            strategy.backward(weighted.loss, model)
        else:
            with uncounted([model.module], micro_batch.buffers) as drop_gradients:
                weighted = compute_loss(model, batch)
                drop_gradients()
                strategy.backward(weighted.loss, model)
    return weighted


def clip_norm(
    model: Wrapped,
    max_norm: float,
    copies: frozenset[int] = frozenset(),
    *,
    norm_type: float = 2.0,
    parameters: Sequence[Tensor] | None = None,
) -> Tensor:
    """Clip by the norm of unscaled gradients, over any meshes."""
    if model.scaler is not None:
        _unscale(model)
    if parameters is None:
        parameters = list(model.module.parameters())
    plain = {*map(type, parameters)} <= {nn.Parameter} or not is_distributed(parameters)
    if plain and model.ctx.mesh.pipeline == 1:
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    norm = total_norm(model, parameters, copies, norm_type)
    scale_local(local_grads(parameters), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def clip_value(model: Wrapped, max_value: float) -> None:
    """Clip the entries of unscaled gradients."""
    _unscale(model)
    clamp_local(local_grads(model.module.parameters()), max_value)


def scale_grads(model: Wrapped, factor: float | Tensor) -> None:
    """Multiply gradients in place."""
    scale_local(local_grads(model.module.parameters()), factor)


def finite(model: Wrapped) -> bool | Tensor:
    """Whether every gradient is finite; with a loss scale, the scaler decides."""
    if model.scaler is not None:
        return True
    # Local parts only; the ranks compare the results.
    grads = (local_part(p.grad) for p in model.module.parameters())
    present = [grad for grad in grads if grad is not None and grad.numel()]
    # The largest absolute value, which does not overflow: few kernels for many parameters.
    return nn.utils.get_total_norm(present, math.inf).isfinite()


def apply(model: Wrapped, update: UpdateSpec) -> UpdateResult:
    """Unscale, scale, clip, update and zero, each by the strategy's own function."""
    strategy, norm = model.strategy, None
    if model.scaler is not None:
        _unscale(model)
    if update.scale is not None:
        strategy.scale_grads(model, update.scale)
    if update.clip_norm is not None:
        norm = strategy.clip_norm(model, update.clip_norm)
    if update.clip_value is not None:
        strategy.clip_value(model, update.clip_value)
    applied = not update.skip
    pace, device = model.ctx.comm.state.slots.get(Pace), model.ctx.device.type
    began = None if pace is None else pace.now(device)
    if model.scaler is not None:
        applied = _scaled_update(model, model.scaler, update)
    elif applied and not update.keep_parameters:
        for optimizer in model.optimizers:
            optimizer.step()
    if pace is not None:
        pace.add(began, device)
    if update.zero:
        _zero_grads(model)
    return UpdateResult(applied=applied, grad_norm=norm)


def _zero_grads(model: Wrapped) -> None:
    for optimizer in model.optimizers:
        # torch's own takes twenty calls, to do what `begin` does.
        if getattr(optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            optimizer.zero_grad()
    begin(model)


def new_scaler(ctx: DistContext, plan: Plan) -> torch.amp.GradScaler | None:
    """A loss scaler if the plan computes in fp16."""
    if plan.precision.compute != "fp16":
        return None
    scale = plan.precision.scale
    return torch.amp.GradScaler(
        ctx.device.type,
        init_scale=scale.initial,
        growth_factor=scale.growth,
        backoff_factor=scale.backoff,
        growth_interval=scale.interval,
    )


def new_window(ctx: DistContext) -> AccumulationWindow:
    """An empty accumulation window; MPS has no float64."""
    dtype = torch.float32 if ctx.device.type == "mps" else torch.float64
    return AccumulationWindow(sums=torch.zeros(4, dtype=dtype, device=ctx.device))


def _unscale(model: Wrapped) -> None:
    scaler = model.scaler
    if scaler is None or model.window.unscaled:
        return
    # torch's unscale_ takes gradients of one mesh only, and reduces over that mesh.
    scale = scaler.scale(torch.ones((), device=model.ctx.device))
    inverse = (scale.double() if scale.device.type != "mps" else scale).reciprocal().float()
    groups = [group["params"] for each in model.optimizers for group in each.param_groups]
    # Each once: a group that was added later has some of the others.
    parameters = dict.fromkeys(itertools.chain(*groups, model.status.others))
    nonfinite = unscale_local(local_grads(parameters), inverse)
    for optimizer in model.optimizers:
        state = scaler._per_optimizer_states[id(optimizer)]
        state["found_inf_per_device"] = {nonfinite.device: nonfinite}
        state["stage"] = OptState.UNSCALED
    model.window.unscaled = True


def _scaled_update(model: Wrapped, scaler: torch.amp.GradScaler, update: UpdateSpec) -> bool:
    """Step every optimizer or none, then update the scale once; whether they stepped."""
    # torch tracks overflow per optimizer and skips them one by one; a step must be all or none.
    flags = [
        flag
        for optimizer in model.optimizers
        for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
    ]
    flag = torch.stack(flags).amax()
    differ = model.status.replica is not None or model.ctx.mesh.pipeline > 1
    if differ or is_distributed(model.module.parameters()):
        # A shard that overflowed is on one rank only; those of the data axis agree.
        flag = ops.reduce(flag, model.ctx, op="max")
    for overflowed in flags:
        overflowed.copy_(flag)
    overflow = bool(flag.item())
    if not overflow and not update.skip and not update.keep_parameters:
        for optimizer in model.optimizers:
            optimizer.step()  # scaler.step would wait for the device, to read the flags again
    scaler.update()
    model.window.unscaled = False
    return not overflow and not update.skip


def to_float(leaf: Any) -> Any:
    """A half-precision tensor as fp32; anything else as it is."""
    is_half = isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if is_half else leaf


def once_per_dtype(collective: Callable[[Tensor], object], tensors: Iterable[Tensor]) -> None:
    """Run a collective in place, on all tensors of a dtype at once."""
    for alike in _by_dtype_and_device(tensors).values():
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        collective(flat)
        for tensor, part in zip(alike, flat.split([each.numel() for each in alike]), strict=True):
            tensor.copy_(part.view(tensor.shape))


def broadcast_tensors(tensors: Iterable[Tensor], ranks: DistContext, *, src: int = 0) -> None:
    """Send the values of one rank to all, in place: as bytes, since gloo lacks some dtypes."""

    def send(flat: Tensor) -> None:
        dist.broadcast(flat.view(torch.uint8), group=ranks.comm.group, group_src=src)

    once_per_dtype(send, tensors)


def is_distributed(parameters: Any) -> bool:
    """Whether any of these parameters is a DTensor."""
    return bool([p for p in parameters if hasattr(p, "device_mesh")])


def local_grads(parameters: Any) -> list[Tensor]:
    """The local tensor of each gradient that exists; writing to it writes to the gradient."""
    return [local_part(grad) for grad in _as_parameters_laid_out(parameters)]


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
        by_groups.setdefault(key, (groups, []))[1].append(local_part(grad))
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
    for part in parts:
        part.clamp_(-limit, limit)


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
    parts: Iterable[Tensor],
) -> dict[tuple[torch.dtype, torch.device], list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for part in parts:
        groups.setdefault((part.dtype, part.device), []).append(part)
    return groups
