"""How much each micro-batch counts in its update.

Strategies average gradients over the ranks that see different tokens. The gradient that an
update wants is that of the mean over all rows, or all weight, of the window on all ranks. So
each loss is multiplied before backward by what makes the average come out right; where the
weight of the window is not known yet, gradients are corrected by one factor when it closes.
"""

from typing import Any

import attrs
import torch
from torch import Tensor

from fxtrain import ops
from fxtrain._errors import StepError
from fxtrain.state import Batch, Weighted, Wrapped

__all__ = ["Share", "close_window", "end_window", "share"]

_SCALE, _SUM = 0, 1  # places in the tally
_MICRO, _ROWS, _FULL, _REAL = 0, 1, 2, 3  # places in the counts


@attrs.frozen(eq=False)
class Share:
    """One micro-batch's part in its update.

    Attributes:
        loss: What backward starts from.
        mean: The micro-batch's own mean loss, detached.
        weight: What that mean averages over.
    """

    loss: Tensor
    mean: Tensor
    weight: Any


def share(loss: Any, batch: Batch, model: Wrapped) -> Share:
    """Scale a loss so that gradients averaged over ranks add up to the update's."""
    plan = model.plan
    if plan.accumulate > 1 or plan.schedule == "samples":
        _count(batch, model)
    if type(loss) is Weighted:
        return _weighted(loss, batch, model)
    sizes = batch.sizes
    rank = model.ctx.axis("data").rank
    mine, ranks = sizes[rank], len(sizes)
    total = batch.window_rows
    if total is None:
        # Not known ahead: weigh against a full window, corrected when it closes.
        total = sum(sizes) if plan.accumulate == 1 else int(model.counts[_FULL])
    if mine * ranks == total:
        part = loss
    elif mine and total % (mine * ranks) == 0:
        # Dividing by the count, as a loop written by hand does, rounds the same way.
        part = loss / (total // (mine * ranks))
    else:
        part = loss * (mine * ranks / total)
    return Share(part, loss.detach(), mine)


def close_window(loss: Any, batch: Batch, model: Wrapped) -> float | Tensor | None:
    """The factor that gradients still need when the window closes; None for none."""
    if model.plan.accumulate == 1:
        return None
    if type(loss) is Weighted:
        losses = model.ctx.axis("loss")
        total = ops.reduce(model.tally[_SUM], losses, op="sum")
        factor = torch.where(total > 0, losses.world_size / (model.tally[_SCALE] * total), 0.0)
        model.tally[:2] = 0
        return factor
    if batch.window_rows is not None:
        return None
    full, rows = int(model.counts[_FULL]), int(model.counts[_ROWS])
    return None if full == rows else full / rows


def end_window(model: Wrapped) -> int:
    """Forget the window; real rows that it held, on all ranks."""
    rows = int(model.counts[_REAL])
    model.counts[: _REAL + 1] = 0
    return rows


def _count(batch: Batch, model: Wrapped) -> None:
    counts, total = model.counts, sum(batch.sizes)
    if counts[_MICRO] == 0:
        counts[_FULL] = model.plan.accumulate * max(batch.sizes) * len(batch.sizes)
    counts[_MICRO] += 1
    counts[_ROWS] += total
    counts[_REAL] += sum(batch.rows)


def _weighted(loss: Weighted, batch: Batch, model: Wrapped) -> Share:
    losses = model.ctx.axis("loss")
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
    if model.plan.accumulate == 1:
        total = ops.reduce(weight, losses, op="sum")
        scale = torch.where(total > 0, losses.world_size / total, 0.0)
    else:
        if model.counts[_MICRO] == 1:
            model.tally[_SCALE] = _rough_scale(weight, model)
        model.tally[_SUM] += weight
        scale = model.tally[_SCALE]
    return Share(loss.total * (scale * present).to(dtype), mean, loss.weight)


def _rough_scale(weight: Tensor, model: Wrapped) -> Tensor:
    """A power of two near the final scale: exact to multiply by, and no overflow in fp16."""
    losses = model.ctx.axis("loss")
    total = ops.reduce(weight, losses, op="sum").clamp(min=1.0) * model.plan.accumulate
    return torch.exp2(torch.round(torch.log2(losses.world_size / total)))
