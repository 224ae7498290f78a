"""How much each micro-batch counts in its update.

Strategies average gradients over the ranks that see different tokens. The gradient that an
update wants is that of the mean over all rows, or all weight, of the window on all ranks. So
each loss is multiplied before backward by what makes the average come out right. All losses of
a window are weighed against what it is expected to hold when it opens; if it turns out to hold
something else, gradients are corrected by one factor when it closes. It does where the end of
the data cannot be known ahead, and where a loop leaves an epoch early.

Of a copy of the model that trains alone (`Plan.local`), "all ranks" are those of the copy.
"""

from typing import Any

import torch
from torch import Tensor

from fxtrain import ops
from fxtrain._errors import StepError
from fxtrain.state import Batch, DistContext, Weighted, WeightedLoss, Wrapped

__all__ = ["close_window", "count", "end_window", "is_empty", "weigh_loss", "window_has_more"]

_SCALE, _SUM = 0, 1  # places in the tally
_MICRO, _ROWS, _FULL, _REAL = 0, 1, 2, 3  # places in the counts


def window_has_more(batch: Batch, model: Wrapped) -> bool:
    """Whether the window may hold more than this micro-batch.

    Without accumulation it does where a run resumes inside a window of another plan.
    """
    return model.plan.accumulate > 1 or batch.window_rows is None


def weigh_loss(
    loss: Any, aux: Any, batch: Batch, model: Wrapped, *, independent: bool = False
) -> WeightedLoss:
    """Scale a loss so that gradients averaged over ranks add up to the update's."""
    sizes = _replica_rows(batch, model) if independent else batch.sizes
    if independent:
        _count_for_average(loss, batch, model, sizes)
    if type(loss) is Weighted:
        return _weigh_explicit(loss, aux, batch, model, independent=independent)
    mine, ranks = batch.sizes[model.ctx.axis("data").rank], len(sizes)
    total = int(model.counts[_FULL]) if window_has_more(batch, model) else sum(sizes) * batch.parts
    if mine * ranks == total != 0:
        part = loss
    elif mine and total % (mine * ranks) == 0:
        # Dividing by the count, as a loop written by hand does, rounds the same way.
        part = loss / (total // (mine * ranks))
    else:
        part = loss * (mine * ranks / total if mine else 0.0)
    mean = loss.detach() if mine else torch.zeros_like(loss.detach())
    return WeightedLoss(loss=part, mean=mean, weight=mine, aux=aux)


def close_window(
    weighted: WeightedLoss, batch: Batch, model: Wrapped, *, independent: bool = False
) -> float | Tensor | None:
    """The factor that gradients still need when the window closes; None for none."""
    if weighted.provisional:
        losses = _group(model, independent=independent)
        total = ops.reduce(model.tally[_SUM], losses, op="sum")
        factor = torch.where(total > 0, losses.world_size / (model.tally[_SCALE] * total), 0.0)
        model.tally[:2] = 0
        return factor
    if not window_has_more(batch, model):
        return None
    rows, full = model.counts[_ROWS : _FULL + 1].tolist()
    return None if rows in (0, full) else full / rows


def is_empty(batch: Batch, model: Wrapped) -> bool:
    """Whether a copy that trains alone had no row in the window that closes."""
    if window_has_more(batch, model):
        return not model.counts[_ROWS]
    return not any(_replica_rows(batch, model))


def end_window(model: Wrapped) -> int:
    """Forget the window; real rows that it held, on all ranks."""
    rows = int(model.counts[_REAL])
    model.counts[: _REAL + 1] = 0
    return rows


def _group(model: Wrapped, *, independent: bool) -> DistContext:
    """The ranks over which gradients are averaged."""
    return model.round.within if independent and model.round else model.ctx.axis("loss")


def _replica_rows(batch: Batch, model: Wrapped) -> tuple[int, ...]:
    """The rows of each rank of a copy that trains alone."""
    assert model.round is not None
    return tuple([batch.sizes[rank] for rank in model.round.peers])


def count(batch: Batch, model: Wrapped, *, independent: bool = False) -> None:
    """Note a micro-batch's rows in the account of its window."""
    sizes = _replica_rows(batch, model) if independent else batch.sizes
    counts = model.counts
    if counts[_MICRO] == 0:
        known = None if independent else batch.window_rows
        counts[_FULL] = known or model.plan.accumulate * max(batch.sizes) * len(sizes)
    counts[_MICRO] += 1
    counts[_ROWS] += sum(sizes)
    counts[_REAL] += sum(batch.rows)


def _count_for_average(loss: Any, batch: Batch, model: Wrapped, sizes: tuple[int, ...]) -> None:
    """Note what this copy trained on, by which it counts when the copies are averaged."""
    now = model.round
    assert now is not None
    if type(loss) is Weighted:
        if batch.sizes[model.ctx.axis("data").rank]:
            now.weight.add_(torch.as_tensor(loss.weight).detach().reshape(()))
        now.rows[2] += 1
    else:
        now.rows[:2] += torch.tensor([sum(sizes), sum(batch.sizes)])


def _weigh_explicit(
    loss: Weighted, aux: Any, batch: Batch, model: Wrapped, *, independent: bool
) -> WeightedLoss:
    losses = _group(model, independent=independent)
    # Rows that stand in for none count for nothing, whatever the loss says of them.
    present = 1 if batch.sizes[model.ctx.axis("data").rank] else 0
    weight = torch.as_tensor(loss.weight, dtype=model.tally.dtype, device=model.tally.device)
    if weight.numel() != 1:
        raise StepError(
            f"Weighted(total, weight): the weight has the shape {list(weight.shape)}. "
            f"Sum it: how many items does the total add up?"
        )
    weight = weight.detach().reshape(()) * present
    dtype = loss.total.dtype
    mean = loss.total.detach() / torch.where(weight == 0, 1.0, weight).to(dtype)
    mean = mean if present else torch.zeros_like(mean)
    provisional = batch.parts > 1 or window_has_more(batch, model)
    if not provisional:
        total = ops.reduce(weight, losses, op="sum")
        scale = torch.where(total > 0, losses.world_size / total, 0.0)
    else:
        if model.counts[_MICRO] <= 1 and batch.part == 0:
            micro = model.plan.accumulate * batch.parts
            model.tally[_SCALE] = _provisional_scale(weight, micro, losses)
        model.tally[_SUM] += weight
        scale = model.tally[_SCALE]
    part = loss.total * (scale * present).to(dtype)
    shown = loss.weight if present else weight
    return WeightedLoss(loss=part, mean=mean, weight=shown, aux=aux, provisional=provisional)


def _provisional_scale(weight: Tensor, micro: int, losses: DistContext) -> Tensor:
    """A power of two near the final scale: exact to multiply by, and no overflow in fp16."""
    total = ops.reduce(weight, losses, op="sum").clamp(min=1.0) * micro
    return torch.exp2(torch.round(torch.log2(losses.world_size / total)))
