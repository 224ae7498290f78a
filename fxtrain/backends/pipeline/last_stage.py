"""What only the last stage of a pipeline has, on every rank of it: losses and outputs."""

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor
from torch import distributed as dist

from fxtrain import _tree, ops
from fxtrain.backends.core.microbatches import join
from fxtrain.backends.pipeline.fake_stages import Received
from fxtrain.state import Batch, Share, Wrapped

__all__ = ["likely_output", "tell_outputs", "tell_share"]


@attrs.frozen
class _Form:
    """What the last stage's losses are like, as it says once.

    Attributes:
        dtype: Of the loss.
        rough: Whether they are weighted, and corrected when the window closes.
        aux: What is beside them, for one micro-batch, with tensors without values; None without.
    """

    dtype: torch.dtype
    rough: bool
    aux: Any


def tell_share(
    model: Wrapped,
    ready: Any,
    shares: list[Share],
    batch: Batch,
    likely: Callable[[], Share],
) -> Share:
    """The batch's share in its update, on every rank of the pipeline.

    Args:
        ready: What was prepared for batches of this kind.
        shares: Of the micro-batches, on the rank of the last stage.
        likely: Gives one without values, for a pretended world, where that rank says nothing.

    Effects:
        A broadcast of four numbers; the first time, and for aux, one of objects.
    """
    engine = model.engine
    if not ready.form:
        silent = model.ctx.comm.simulated and not shares
        own = [likely()] if silent else shares
        ready.form.append(_tell(model, _form_of(own[0]) if own else None))
    form: _Form = ready.form[0]
    numbers = torch.zeros(4, dtype=model.tally.dtype, device=model.tally.device)
    if shares:
        weights = torch.stack([_as(share.weight, numbers) for share in shares])
        means = torch.stack([_as(share.mean, numbers) for share in shares])
        total = weights.sum()
        numbers[0] = (means * weights).sum() / torch.where(total == 0, 1.0, total)
        numbers[1] = total
        numbers[2:] = model.tally[:2]
    source = engine.axis.comm.ranks[engine.source]
    dist.broadcast(numbers, source, group=engine.axis.comm.group)
    model.tally[:2] = numbers[2:]
    rows = batch.sizes[model.ctx.axis("data").rank]
    aux = None if form.aux is None else _tell_aux(model, ready, shares, rows // ready.parts)
    mean = numbers[0].to(form.dtype)
    weight = numbers[1] if form.rough else rows
    return Share(loss=mean, mean=mean, weight=weight, aux=aux, rough=form.rough)


def tell_outputs(model: Wrapped, ready: Any, whole: Any, likely: Callable[[], Any]) -> Any:
    """The last stage's outputs on every rank of the pipeline.

    Args:
        whole: On that rank; None on others.
        likely: Gives them without values, for a pretended world, where that rank says nothing.
    """
    engine = model.engine
    if not ready.form:
        own = likely() if model.ctx.comm.simulated and whole is None else whole
        ready.form.append(_tell(model, _tree.map_leaves(_emptied, own)))
    if whole is None:
        whole = _tree.map_leaves(lambda leaf: _made(leaf, model.ctx.device), ready.form[0])
    return ops.broadcast(whole, engine.axis, src=engine.source)


def likely_output(model: Wrapped, ready: Any, call: Any) -> Any:
    """What a pretended last stage gives for a micro-batch, without values."""
    last = len(model.engine.layout.ranks) - 1
    mode = Received()
    received = tuple(mode.like(meta, model.ctx.device) for meta in ready.sends[last - 1])
    with ops.autocast(model):
        return model.engine.twins[last].visit(call, received, ())[1]


def _form_of(share: Share) -> _Form:
    return _Form(share.mean.dtype, share.rough, _tree.map_leaves(_emptied, share.aux))


def _tell_aux(model: Wrapped, ready: Any, shares: list[Share], rows: int) -> Any:
    """What is beside the losses of micro-batches with so many rows, put together."""
    device = model.ctx.device
    own = [_tree.map_leaves(_detached, share.aux) for share in shares]
    if model.ctx.comm.simulated and not own:
        likely = _tree.map_leaves(lambda leaf: _made(leaf, device), ready.form[0].aux)
        own = [likely] * ready.parts
    told = _tell(model, join(own, rows) if own else None)
    return _tree.map_leaves(lambda leaf: _on(leaf, device), told)


def _tell(model: Wrapped, value: Any) -> Any:
    """The last stage's object on every rank; in a pretended world this rank's own."""
    axis, source = model.engine.axis, model.engine.source
    if model.ctx.comm.simulated:  # tensors without values do not travel as objects
        ops.broadcast_object(None, axis, src=source)
        return value
    return ops.broadcast_object(value, axis, src=source)


def _as(value: Any, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device).detach().reshape(())


def _detached(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf


def _on(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _emptied(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")


def _made(leaf: Any, device: torch.device) -> Any:
    """A leaf to receive into, or to go on with where nothing comes: whole numbers are then 0."""
    return torch.zeros_like(leaf, device=device) if isinstance(leaf, Tensor) else leaf
