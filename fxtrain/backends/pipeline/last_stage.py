"""Results that only the last stage of a pipeline computes, on every rank: losses and outputs."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain import _tree, ops
from fxtrain.backends.core.microbatches import join
from fxtrain.backends.pipeline.fake_stages import ReceivedFakes
from fxtrain.ops.devices import as_scalar
from fxtrain.state import Batch, WeightedLoss, Wrapped


@attrs.frozen
class _LossForm:
    """A description of the last stage's losses, broadcast once.

    Attributes:
        dtype: Of the loss.
        provisional: Whether they are weighted, and corrected when the window closes.
        aux: The aux metrics of one micro-batch, with fake tensors; None without any.
    """

    dtype: torch.dtype
    provisional: bool
    aux: Any


def broadcast_loss(
    model: Wrapped,
    ready: Any,
    shares: list[WeightedLoss],
    batch: Batch,
    fake: Callable[[], WeightedLoss],
) -> WeightedLoss:
    """The batch's weighted loss, on every rank of the pipeline.

    Args:
        ready: The schedule for batches of this kind.
        shares: Losses of the micro-batches, on the rank of the last stage.
        fake: Creates a fake one in a simulated world, where that rank sends nothing.

    Effects:
        A broadcast of four numbers; the first time, and for aux metrics, one of objects.
    """
    engine, window = model.engine, model.window
    if ready.form is None:
        silent = model.ctx.comm.simulated and not shares
        own = [fake()] if silent else shares
        ready.form = _broadcast_object(model, _form_of(own[0]) if own else None)
    form: _LossForm = ready.form
    numbers = torch.zeros_like(window.sums)
    if shares:
        weights = torch.stack([_as(weighted.weight, numbers) for weighted in shares])
        means = torch.stack([_as(weighted.mean, numbers) for weighted in shares])
        total = weights.sum()
        numbers[0] = (means * weights).sum() / torch.where(total == 0, 1.0, total)
        numbers[1] = total
        numbers[2], numbers[3] = window.scale, window.weight
    source = engine.axis.comm.ranks[engine.source]
    dist.broadcast(numbers, source, group=engine.axis.comm.group)
    window.scale.copy_(numbers[2])
    window.weight.copy_(numbers[3])
    rows = batch.sizes[model.ctx.axis("data").rank]
    aux = None if form.aux is None else _broadcast_aux(model, ready, shares, rows // ready.parts)
    mean = numbers[0].to(form.dtype)
    weight = numbers[1] if form.provisional else rows
    return WeightedLoss(loss=mean, mean=mean, weight=weight, aux=aux, provisional=form.provisional)


def broadcast_outputs(model: Wrapped, ready: Any, whole: Any, fake: Callable[[], Any]) -> Any:
    """The last stage's outputs on every rank of the pipeline.

    Args:
        whole: The outputs on that rank; None on others.
        fake: Creates fake ones in a simulated world, where that rank sends nothing.
    """
    engine = model.engine
    if ready.form is None:
        own = fake() if model.ctx.comm.simulated and whole is None else whole
        ready.form = _broadcast_object(model, _tree.map_leaves(_emptied, own))
    if whole is None:
        whole = _tree.map_leaves(lambda leaf: _made(leaf, model.ctx.device), ready.form)
    return ops.broadcast(whole, engine.axis, src=engine.source)


def fake_output(model: Wrapped, ready: Any, call: Any) -> Any:
    """What a simulated last stage returns for a micro-batch, without values."""
    last = len(model.engine.partition.ranks) - 1
    mode = ReceivedFakes()
    received = tuple(mode.like(meta, model.ctx.device) for meta in ready.sends[last - 1])
    with ops.autocast(model):
        return model.engine.fake_stages[last].visit(call, received, ())[1]


def _form_of(weighted: WeightedLoss) -> _LossForm:
    return _LossForm(
        weighted.mean.dtype, weighted.provisional, _tree.map_leaves(_emptied, weighted.aux)
    )


def _broadcast_aux(model: Wrapped, ready: Any, shares: list[WeightedLoss], rows: int) -> Any:
    """The aux metrics of micro-batches with this many rows, joined."""
    device = model.ctx.device
    own = [_tree.map_leaves(_detached, weighted.aux) for weighted in shares]
    if model.ctx.comm.simulated and not own:
        fake = _tree.map_leaves(lambda leaf: _made(leaf, device), ready.form.aux)
        own = [fake] * ready.parts
    told = _broadcast_object(model, join(own, rows) if own else None)
    return _tree.map_leaves(lambda leaf: _on(leaf, device), told)


def _broadcast_object(model: Wrapped, value: Any) -> Any:
    """The last stage's object on every rank; in a simulated world this rank's own."""
    axis, source = model.engine.axis, model.engine.source
    if model.ctx.comm.simulated:  # fake tensors cannot be sent as objects
        ops.broadcast_object(None, axis, src=source)
        return value
    return ops.broadcast_object(value, axis, src=source)


def _as(value: Any, like: Tensor) -> Tensor:
    return as_scalar(value, like).reshape(())


def _detached(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _on(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _emptied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")


def _made(leaf: Any, device: torch.device) -> Any:
    """A tensor to receive into; integers are 0, for simulated worlds where nothing arrives."""
    return torch.zeros_like(leaf, device=device) if isinstance(leaf, Tensor) else leaf
