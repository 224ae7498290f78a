"""Wrong arguments of what runs in every step, and what the error of each says."""

import torch.nn.functional as F

import fxtrain as fx

__all__ = ["WRONG_STEPS"]


def _loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _criterion(outputs, targets):
    return F.mse_loss(outputs, targets)


# As `WRONG` of `_wrong_calls`.
WRONG_STEPS = {
    "step, the context last, by name": (
        lambda ctx, model, loader, batch: fx.step(batch, fx.StepFns(model, _loss), ctx=ctx),
        "StepArgumentError: step(ctx, batch, fns) takes a context, a batch and a model with its "
        "loss; found Batch, StepFns, ctx=DistContext. Use fx.step(ctx, batch, fx.StepFns(",
    ),
    "update, the context last, by name": (
        lambda ctx, model, loader, batch: fx.update(batch, model, _loss(model, batch), ctx=ctx),
        "found Batch, Wrapped, Tensor, ctx=DistContext. Use fx.update(ctx, batch, model, loss), ",
    ),
    "step, a function of outputs and targets": (
        lambda ctx, model, loader, batch: fx.step(ctx, batch, fx.StepFns(model, _criterion)),
        "StepError: StepFns(loss=...) takes a function; it is called with (model, batch), and this "
        "one takes (outputs, targets). For example: loss=lambda model, batch: _criterion(model(",
    ),
    "evaluate, a function of outputs and targets": (
        lambda ctx, model, loader, batch: fx.evaluate(ctx, model, loader, _criterion),
        "and this one takes (outputs, targets). For example: fn=lambda model, batch: _criterion(",
    ),
    "Weighted, no weight": (
        lambda ctx, model, loader, batch: fx.Weighted(_loss(model, batch)),
        "StepArgumentError: Weighted(total, weight) takes a sum of losses and the number of items "
        "that it sums; found Tensor. Use fx.Weighted(losses.sum(), losses.numel()).",
    ),
    "Weighted, another name": (
        lambda ctx, model, loader, batch: fx.Weighted(_loss(model, batch), count=2),
        "found Tensor, count=int. Use fx.Weighted(losses.sum(), losses.numel()).",
    ),
    "Position, by position": (
        lambda ctx, model, loader, batch: fx.Position(3),
        "DataArgumentError: Position takes its fields by name (epoch, index, samples, updates, "
        "micro, is_last), found int. Use fx.Position(epoch=3), or the position of a batch, a ",
    ),
    "Position, another name": (
        lambda ctx, model, loader, batch: fx.Position(indx=3),
        "Position(indx=...): no such argument. Did you mean 'index'?",
    ),
    "Mean.update, nothing": (
        lambda ctx, model, loader, batch: fx.Mean().update(),
        "DataArgumentError: mean.update(value, weight=1) takes a number, a tensor of one element, "
        "fx.Weighted or the report of a step; found nothing. Use mean = mean.update(report), or ",
    ),
}
