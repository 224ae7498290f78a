"""How much each micro-batch counts in its update.

Strategies average gradients over the ranks that see different tokens, but an update wants the
gradient of the mean over all rows (or over the total weight) of the window on all ranks. So each
loss is multiplied, before backward, by the factor that makes the average correct. All losses of a
window are weighted by what the window is expected to contain when it opens. If it turns out to
contain something else, one factor corrects the gradients when it closes: at the end of the data,
and where micro-batches differ in their rows.

For a replica that trains independently (`ModelStatus.replica`), "all ranks" are its own.
"""

import struct
import time
from typing import Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain import _tree
from fxtrain.errors import StepError
from fxtrain.ops.collectives import reduce
from fxtrain.ops.devices import as_scalar
from fxtrain.ops.transport.exchange import exchange_payloads, has_few_ranks, rank_loss_guard, settle
from fxtrain.state import Batch, DistContext, Weighted, WeightedLoss, Wrapped

_NUMBER = struct.Struct("<d")
_TOTAL = ("step", "the weight of a Weighted loss")
_HALF = (torch.bfloat16, torch.float16)


def weigh_loss(loss: Any, aux: Any, batch: Batch, model: Wrapped) -> WeightedLoss:
    """Scale a loss so that the gradients, averaged over ranks, are those of the update."""
    sizes, local_rows = batch.sizes, batch.sizes[model.ctx.axis("data").rank]
    if not local_rows and aux is not None:
        aux = _tree.map_leaves(_zero, aux)
    if type(loss) is Weighted:
        return _weigh_explicit(loss, aux, batch, model, present=local_rows > 0)
    if model.status.replica is not None:
        sizes = model.status.replica.sizes(batch)
    ranks, total = len(sizes), sum(sizes) * batch.parts
    if model.plan.weigh_by == "batches":
        total *= model.plan.accumulate
    elif model.window.micro:  # else the window is this batch
        total = model.window.full_rows
    if local_rows * ranks == total != 0:
        part = loss
    elif local_rows and total % (local_rows * ranks) == 0:
        # Divide by the count, as a hand-written loop does, so that the result rounds the same way.
        part = loss / (total // (local_rows * ranks))
    else:
        part = loss * (local_rows * ranks / total if local_rows else 0.0)
    mean = loss.detach() if local_rows else torch.zeros_like(loss.detach())
    return WeightedLoss(loss=part, mean=mean, weight=local_rows, aux=aux)


def _zero(leaf: Any) -> Any:
    """A metric of placeholder rows, which may be NaN even times a weight of 0."""
    if isinstance(leaf, Tensor):
        return torch.zeros_like(leaf)
    return 0 if type(leaf) in (int, float) else leaf


def close_window(model: Wrapped) -> float | Tensor | None:
    """The factor by which to correct gradients when a window closes; None if none is needed.

    Not called for windows of one micro-batch whose loss was already weighted exactly.
    """
    if model.window.provisional:
        losses, window = ranks_of_update(model), model.window
        total = reduce(window.weight, losses, op="sum")
        factor = torch.where(total > 0, losses.world_size / (window.scale * total), 0.0)
        window.scale.zero_()
        window.weight.zero_()
        return factor
    rows, full = model.window.rows, model.window.full_rows
    exact = rows in (0, full) or model.plan.weigh_by == "batches"
    return None if exact else full / rows


def ranks_of_update(model: Wrapped) -> DistContext:
    """The ranks over which gradients are averaged."""
    replica = model.status.replica
    return model.ctx.axis("loss") if replica is None else replica.within


def count_rows(batch: Batch, model: Wrapped) -> None:
    """Add a micro-batch's rows to the model's window.

    A full window is expected to have as many rows in each micro-batch as this one has on the ranks
    with the most: `close_window` corrects that.
    """
    window, replica = model.window, model.status.replica
    sizes = batch.sizes if replica is None else replica.sizes(batch)
    if not window.micro:
        window.epoch = batch.position.epoch
        window.full_rows = model.plan.accumulate * max(batch.sizes) * len(sizes)
    window.micro += 1
    window.rows += sum(sizes)
    window.real_rows += sum(batch.rows)


def _weigh_explicit(
    loss: Weighted, aux: Any, batch: Batch, model: Wrapped, *, present: bool
) -> WeightedLoss:
    """As `weigh_loss`; `present` unless this rank has no row in the batch.

    Placeholder rows count for nothing, whatever weight the loss returned for them.
    """
    losses, window = ranks_of_update(model), model.window
    provisional = batch.parts > 1 or window.micro > 0
    if isinstance(loss.weight, Tensor) and loss.weight.numel() != 1:
        raise StepError(
            f"Weighted(total, weight): the weight has shape {list(loss.weight.shape)}. Reduce it "
            f"to one number, the count of items that the total adds up.",
            code="FX502",
        )
    on_host = not provisional and _is_on_host(losses)
    if on_host and not losses.comm.simulated:  # a dry run has no values
        return _weigh_on_host(loss, aux, losses, present=present)
    weight = as_scalar(loss.weight, window.sums)
    # Not a product: the weight of placeholder rows may be infinite.
    weight = weight.reshape(()) if present else torch.zeros_like(weight.reshape(()))
    dtype = loss.total.dtype
    mean = loss.total.detach() / torch.where(weight == 0, 1.0, weight).to(dtype)
    mean = mean if present else torch.zeros_like(mean)
    if not provisional:
        if on_host and _has_own_control(losses):
            total = _all_reduced(weight.to(torch.float64, copy=True), losses)
        else:
            total = reduce(weight, losses, op="sum")
        scale = torch.where(total > 0, losses.world_size / total, 0.0)
    else:
        if window.micro <= 1 and batch.part == 0:
            micro = model.plan.accumulate * batch.parts
            window.scale.copy_(_provisional_scale(weight, micro, losses))
        window.weight.add_(weight)
        scale = window.scale
    part = loss.total * (scale * present).to(dtype)
    shown = loss.weight if present else weight
    return WeightedLoss(
        loss=part, mean=mean, weight=shown, aux=aux, provisional=provisional, explicit=True
    )


def _is_on_host(losses: DistContext) -> bool:
    """Whether a few ranks compute on CPUs."""
    on_cpu = losses.device.type == "cpu" and losses.world_size > 1
    return on_cpu and has_few_ranks(losses)


def _has_own_control(ctx: DistContext) -> bool:
    """Whether the group for control traffic is not that of gradients, as that of an axis may be."""
    return ctx.comm.control is not ctx.comm.group


def _weigh_on_host(loss: Weighted, aux: Any, losses: DistContext, *, present: bool) -> WeightedLoss:
    """As `_weigh_explicit`, of a window of one micro-batch, where no device computes.

    Weights are numbers of Python, and are added up as such: operators and a reduction of tensors
    would take a tenth of a small step.
    """
    given: Any = loss.weight.detach() if isinstance(loss.weight, Tensor) else loss.weight
    weight = float(given) if present else 0.0
    total = _sum_weights(losses, weight)
    mean = loss.total.detach()
    mean = mean / (weight or 1.0) if present else torch.zeros_like(mean)
    scale = losses.world_size / total if present and total > 0 else 0.0
    shown = loss.weight if present else weight
    return WeightedLoss(loss=loss.total * scale, mean=mean, weight=shown, aux=aux, explicit=True)


def _sum_weights(ctx: DistContext, weight: float) -> float:
    """The sum of the weights of few ranks that compute on CPUs, equal on all of them.

    Raises:
        CollectiveError: a rank never joined; on every rank. Over an axis, also that calls differ.
    """
    if _has_own_control(ctx):
        number = torch.tensor(weight, dtype=torch.float64, device="cpu")
        return _all_reduced(number, ctx).item()
    payload = torch.frombuffer(bytearray(_NUMBER.pack(weight)), dtype=torch.uint8)
    parts = exchange_payloads(ctx, _TOTAL, payload)
    return sum([_NUMBER.unpack(bytes(part.tolist()))[0] for part in parts])


def _all_reduced(weight: Tensor, ctx: DistContext) -> Tensor:
    """The sum of the weights, in place, over the control group of all ranks.

    Between forward and backward every core computes, and a message of the thread that computes
    takes a millisecond: gloo's own thread waits for a lock that it holds. An all-reduce runs in
    another thread. It is not compared. Calls that are compared begin with messages, with which it
    does not mix: where a rank makes one of them instead, both wait for the timeout, and the error
    names both. The group of an axis has gradients too, so there packets are sent.
    """
    state = settle(ctx)
    state.count += 1
    state.recent.append((state.count, _TOTAL, time.time_ns()))
    with rank_loss_guard(ctx, _TOTAL):
        dist.all_reduce(weight, group=ctx.comm.control)
    state.completed = state.count
    return weight


def _provisional_scale(weight: Tensor, micro: int, losses: DistContext) -> Tensor:
    """A power of two near the final scale: exact to multiply by, and no overflow in fp16."""
    total = reduce(weight, losses, op="sum").clamp(min=1.0) * micro
    return torch.exp2(torch.round(torch.log2(losses.world_size / total)))


def loss_and_aux(out: Any) -> tuple[Any, Any]:
    """What a loss function returned: a loss, checked, and aux metrics."""
    loss, aux = out if type(out) is tuple and len(out) == 2 else (out, None)
    weighted = type(loss) is Weighted
    total: Any = loss.total if weighted else loss
    if hasattr(total, "full_tensor"):  # a loss computed from sharded logits
        total = total.full_tensor()
    check_loss(total)
    if total.ndim:
        total = total.reshape(())  # as torch's backward would
    if weighted:
        return loss if total is loss.total else attrs.evolve(loss, total=total), aux
    return total, aux


def check_loss(loss: Any) -> None:
    """Refuse a loss from which backward cannot start."""
    if not isinstance(loss, Tensor):
        raise StepError(
            f"The loss is a {type(loss).__name__}, not a tensor. Return a scalar tensor, "
            f"fx.Weighted(total, weight), or a pair of either and aux metrics.",
            code="FX502",
        )
    if loss.numel() != 1:
        raise StepError(
            f"The loss has shape {list(loss.shape)}. Return a scalar: reduce it with "
            f".mean(), or use fx.Weighted(losses.sum(), losses.numel()).",
            code="FX502",
        )
    if not loss.requires_grad:
        raise StepError(
            "The loss does not require grad. Compute it from parameters that require grad, "
            "outside torch.no_grad, and do not detach it.",
            code="FX502",
        )


def check_dtype(call: str, loss: Any, model: Wrapped) -> None:
    """Refuse a loss that autocast would have computed in fp32."""
    compute = model.plan.precision.compute
    dtype = getattr(loss.total if isinstance(loss, Weighted) else loss, "dtype", None)
    if dtype in _HALF:
        raise StepError(
            f"{call}: the loss is {dtype}, since it was computed outside of autocast, under a "
            f"plan with precision={compute!r}. Compute it as fx.step does: `with "
            f"fx.ops.autocast(model): loss = ...`, or from outputs in fp32 (outputs.float(), or "
            f"Plan(precision=fx.Precision(compute={compute!r}, output='fp32'))).",
            code="FX502",
        )
