"""How much each micro-batch counts in its update.

Strategies average gradients over the ranks that see different tokens, but an update wants the
gradient of the mean over all rows (or over the total weight) of the window on all ranks. So each
loss is multiplied, before backward, by the factor that makes the average correct. All losses of a
window are weighted by what the window is expected to contain when it opens. If it turns out to
contain something else, one factor corrects the gradients when it closes. This happens where the
end of the data is not known in advance, and where a loop leaves an epoch early.

For replicas that train independently (`Plan.local`), "all ranks" are the ranks of one replica.
"""

from typing import Any

import torch
from torch import Tensor

from fxtrain import _tree, ops
from fxtrain.errors import StepError
from fxtrain.ops.devices import as_scalar
from fxtrain.state import (
    Batch,
    DistContext,
    Round,
    Weighted,
    WeightedLoss,
    Wrapped,
    round_of,
)


def is_independent(model: Wrapped) -> bool:
    """Whether the model makes its next update as an independent replica."""
    local = model.plan.local
    warmed_up = local is not None and model.window.updates >= local.warmup
    return warmed_up and round_of(model) is not None


def is_one_rank(model: Wrapped) -> bool:
    """Whether an independent replica has one rank."""
    return len(_round(model).peers) == 1


def weigh_loss(
    loss: Any, aux: Any, batch: Batch, model: Wrapped, data_rank: int, *, independent: bool = False
) -> WeightedLoss:
    """Scale a loss so that the gradients, averaged over ranks, are those of the update.

    Args:
        data_rank: Of this rank on the data axis.
    """
    sizes, mine = batch.sizes, batch.sizes[data_rank]
    if not mine and aux is not None:
        aux = _tree.map_leaves(_zero, aux)
    if independent:
        sizes = _replica_rows(batch, model)
        _count_for_average(loss, batch, model, sizes, present=mine > 0)
    if type(loss) is Weighted:
        return _weigh_explicit(loss, aux, batch, model, independent=independent, present=mine > 0)
    ranks, total = len(sizes), sum(sizes) * batch.parts
    if model.window.micro:  # else the window is this batch
        total = model.window.full_rows
    if mine * ranks == total != 0:
        part = loss
    elif mine and total % (mine * ranks) == 0:
        # Divide by the count, as a hand-written loop does, so that the result rounds the same way.
        part = loss / (total // (mine * ranks))
    else:
        part = loss * (mine * ranks / total if mine else 0.0)
    mean = loss.detach() if mine else torch.zeros_like(loss.detach())
    return WeightedLoss(loss=part, mean=mean, weight=mine, aux=aux)


def _zero(leaf: Any) -> Any:
    """A metric of placeholder rows, which may be NaN even times a weight of 0."""
    if isinstance(leaf, Tensor):
        return torch.zeros_like(leaf)
    return 0 if type(leaf) in (int, float) else leaf


def close_window(
    weighted: WeightedLoss, model: Wrapped, *, independent: bool = False
) -> float | Tensor | None:
    """The factor by which to correct gradients when a window closes; None if none is needed.

    Not called for windows of one micro-batch whose loss was already weighted exactly.
    """
    if weighted.provisional:
        losses, window = _group(model, independent=independent), model.window
        total = ops.reduce(window.weight, losses, op="sum")
        factor = torch.where(total > 0, losses.world_size / (window.scale * total), 0.0)
        torch._foreach_zero_([window.scale, window.weight])
        return factor
    rows, full = model.window.rows, model.window.full_rows
    return None if rows in (0, full) else full / rows


def is_empty(batch: Batch, model: Wrapped) -> bool:
    """Whether an independent replica had no row in the closing window."""
    if model.window.micro:
        return not model.window.rows
    return not any(_replica_rows(batch, model))


def _group(model: Wrapped, *, independent: bool) -> DistContext:
    """The ranks over which gradients are averaged."""
    return _round(model).within if independent else model.ctx.axis("loss")


def _replica_rows(batch: Batch, model: Wrapped) -> tuple[int, ...]:
    """The rows of each rank of an independent replica."""
    return tuple([batch.sizes[rank] for rank in _round(model).peers])


def _round(model: Wrapped) -> Round:
    """The averaging state of an independent replica."""
    now = round_of(model)
    assert now is not None
    return now


def count(batch: Batch, model: Wrapped, *, independent: bool = False) -> None:
    """Add a micro-batch's rows to the model's window.

    The rows of a full window are those of the loader's, if it opens with this batch too, and an
    estimate otherwise, as for a model that skips batches: `close_window` corrects it.
    """
    sizes = _replica_rows(batch, model) if independent else batch.sizes
    window = model.window
    if not window.micro:
        window.epoch = batch.position.epoch
        agrees = batch.position.micro == 1 and not independent
        known = batch.window_rows if agrees else None
        window.full_rows = known or model.plan.accumulate * max(batch.sizes) * len(sizes)
    window.micro += 1
    window.rows += sum(sizes)
    window.real_rows += sum(batch.rows)


def _count_for_average(
    loss: Any, batch: Batch, model: Wrapped, sizes: tuple[int, ...], *, present: bool
) -> None:
    """Add what this replica trained on, by which it is weighted in the next average."""
    now = _round(model)
    if type(loss) is Weighted:
        if present:
            weight = loss.weight
            if not isinstance(weight, Tensor):
                weight = torch.tensor(weight, device="cpu")
            now.open_weight.add_(weight.detach().reshape(()))
        now.open_rows[2] += 1
    else:
        now.open_rows[:2] += torch.tensor([sum(sizes), sum(batch.sizes)], device="cpu")


def _weigh_explicit(
    loss: Weighted, aux: Any, batch: Batch, model: Wrapped, *, independent: bool, present: bool
) -> WeightedLoss:
    """As `weigh_loss`; `present` unless this rank has no row in the batch.

    Placeholder rows count for nothing, whatever weight the loss returned for them.
    """
    losses = _group(model, independent=independent)
    window = model.window
    weight = as_scalar(loss.weight, window.sums)
    if weight.numel() != 1:
        raise StepError(
            f"Weighted(total, weight): the weight has shape {list(weight.shape)}. Reduce it to one "
            f"number, the count of items that the total adds up.",
            code="FX502",
        )
    # Not a product: the weight of placeholder rows may be infinite.
    weight = weight.reshape(()) if present else torch.zeros_like(weight.reshape(()))
    dtype = loss.total.dtype
    mean = loss.total.detach() / torch.where(weight == 0, 1.0, weight).to(dtype)
    mean = mean if present else torch.zeros_like(mean)
    provisional = batch.parts > 1 or window.micro > 0
    if not provisional:
        total = ops.reduce(weight, losses, op="sum")
        scale = torch.where(total > 0, losses.world_size / total, 0.0)
    else:
        if window.micro <= 1 and batch.part == 0:
            micro = model.plan.accumulate * batch.parts
            window.scale.copy_(_provisional_scale(weight, micro, losses))
        window.weight.add_(weight)
        scale = window.scale
    part = loss.total * (scale * present).to(dtype)
    shown = loss.weight if present else weight
    return WeightedLoss(loss=part, mean=mean, weight=shown, aux=aux, provisional=provisional)


def _provisional_scale(weight: Tensor, micro: int, losses: DistContext) -> Tensor:
    """A power of two near the final scale: exact to multiply by, and no overflow in fp16."""
    total = ops.reduce(weight, losses, op="sum").clamp(min=1.0) * micro
    return torch.exp2(torch.round(torch.log2(losses.world_size / total)))
