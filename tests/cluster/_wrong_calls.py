"""Arguments in the wrong place, and what the error of each says."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx

__all__ = ["WRONG", "plateau", "sgd"]


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def _loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


# What is called, with a context, a model, its loader and a batch, and words of the error.
WRONG = {
    "step, swapped": (
        lambda ctx, model, loader, batch: fx.step(ctx, fx.StepFns(model, _loss), batch),
        "StepError: step takes fx.StepFns, found Batch. Use fx.step(ctx, batch,",
    ),
    "step, a model": (
        lambda ctx, model, loader, batch: fx.step(ctx, batch, model),
        "StepError: step takes fx.StepFns, found Wrapped. Use fx.step(ctx, batch,",
    ),
    "update, the loader": (
        lambda ctx, model, loader, batch: fx.update(ctx, loader, model, _loss(model, batch)),
        "StepError: update takes a Batch, found Sharded. Use `for batch in loader:`,",
    ),
    "batch, too early": (
        lambda ctx, model, loader, batch: loader.at(batch.position).batch,
        "DataError: batch: this loader has yielded no batch yet. Iterate it first.",
    ),
    "schedule, swapped": (
        lambda ctx, model, loader, batch: fx.ops.schedule(model, 0.5),
        "StepError: ops.schedule takes a wrapped model, found float. Use model = fx.wrap(net, ctx,",
    ),
    "backward, swapped": (
        lambda ctx, model, loader, batch: fx.ops.backward(model, _loss(model, batch)),
        "StepError: ops.backward takes a wrapped model, found Tensor. Use model =",
    ),
    "clip_norm, a module": (
        lambda ctx, model, loader, batch: fx.ops.clip_norm(model.module, 1.0),
        "StepError: ops.clip_norm takes a wrapped model, found Sequential.",
    ),
    "a criterion": (
        lambda ctx, model, loader, batch: fx.StepFns(model, nn.CrossEntropyLoss()),
        "outputs and targets. For example: lambda model, batch: F.cross_entropy(model(batch[0]), ",
    ),
    "a class of criteria": (
        lambda ctx, model, loader, batch: fx.StepFns(model, nn.CrossEntropyLoss),
        "takes a function of (model, batch), and CrossEntropyLoss takes outputs and targets.",
    ),
    "a function of torch": (
        lambda ctx, model, loader, batch: fx.StepFns(model, F.mse_loss),
        "takes a function of (model, batch), and mse_loss takes outputs and targets.",
    ),
    "evaluate, a criterion": (
        lambda ctx, model, loader, batch: fx.evaluate(ctx, model, loader, nn.MSELoss()),
        "StepError: evaluate(fn=...) takes a function of (model, batch), and MSELoss takes outputs",
    ),
    "evaluate, nothing": (
        lambda ctx, model, loader, batch: fx.evaluate(ctx, model, loader, lambda *_: None),
        "DataError: evaluate: fn returned None, which has no values. Return a number",
    ),
    "wrap, DataParallel": (
        lambda ctx, model, loader, batch: fx.wrap(nn.DataParallel(nn.Linear(2, 2)), ctx),
        "PlanError: wrap: the model is inside torch's DataParallel, which fx.wrap takes the place "
        "of. Pass model.module.",
    ),
    "a strategy, Local SGD": (
        lambda ctx, model, loader, batch: fx.Plan(strategy=fx.LocalSGD(every=4)),
        "choose a strategy config, such as fx.DDP(). Use Plan(local=fx.LocalSGD(...)).",
    ),
    "a strategy, TP": (
        lambda ctx, model, loader, batch: fx.Plan(strategy=fx.TP()),
        "Use Plan(strategy=fx.FSDP(tensor=fx.TP(...))).",
    ),
    "detect, a device": (
        lambda ctx, model, loader, batch: fx.detect("cpu"),
        "ContextError: detect(env='cpu'): not a mapping of environment variables. Name the device "
        'as fx.detect(device="cpu").',
    ),
    "preemption, a model": (
        lambda ctx, model, loader, batch: fx.ops.preemption(model).__enter__(),
        "ContextError: preemption: ctx is a Wrapped, not a context from fx.detect().",
    ),
    "fit, a model": (
        lambda ctx, model, loader, batch: fx.fit(ctx, model, loader, "runs/none", epochs=1),
        "PlanError: fit takes fx.StepFns, found Wrapped. Use fx.fit(ctx, fx.StepFns(model, loss),",
    ),
    "fit, epochs as text": (
        lambda ctx, model, loader, batch: next(
            fx.fit(ctx, fx.StepFns(model, _loss), loader, "runs/none", epochs="1")
        ),
        "PlanError: fit(epochs='1'): choose a whole number or None.",
    ),
    "step, no context": (
        lambda ctx, model, loader, batch: fx.step(None, batch, fx.StepFns(model, _loss)),
        "ContextError: step: ctx is a NoneType, not a context from fx.detect(). Check the order",
    ),
    "save, swapped": (
        lambda ctx, model, loader, batch: fx.save(ctx, "runs/none", model),
        "ContextError: save: ctx is a str, not a context from fx.detect(). Check the order",
    ),
    "precision, torch's": (
        lambda ctx, model, loader, batch: fx.Plan(precision=torch.bfloat16),
        'or an fx.Precision(...). Use precision="bf16".',
    ),
    "compile, a mode": (
        lambda ctx, model, loader, batch: fx.Plan(compile="max-autotune"),
        'Use compile=fx.Compile(mode="max-autotune").',
    ),
    "step, an epoch": (
        lambda ctx, model, loader, batch: fx.step(
            ctx, next(iter(loader.epochs(9))), fx.StepFns(model, _loss)
        ),
        "StepError: step takes a Batch, found Sharded. Use `for batch in loader:`, where loader = ",
    ),
    "wrap, a plan for a context": (
        lambda ctx, model, loader, batch: fx.wrap(nn.Linear(2, 2), fx.Plan()),
        "PlanError: wrap: ctx is a Plan, not a context. Use fx.wrap(net, fx.detect()).",
    ),
    "wrap, swapped": (
        lambda ctx, model, loader, batch: fx.wrap(ctx, nn.Linear(2, 2), fx.Plan()),
        "PlanError: wrap takes a torch.nn.Module, found DistContext. For example:",
    ),
    "shard, swapped": (
        lambda ctx, model, loader, batch: fx.shard(ctx, DataLoader([1])),
        "DataError: shard takes a torch DataLoader, an iterable or a function of a",
    ),
    "restore, the model first": (
        lambda ctx, model, loader, batch: fx.restore(model, "runs/none", ctx),
        "ContextError: restore: ctx is a str, not a context from fx.detect(). Check the order",
    ),
    "load": (
        lambda ctx, model, loader, batch: fx.load("runs/none", ctx, model),
        "module 'fxtrain' has no attribute 'load'. Use fx.restore(\"runs/a\", ctx, model)",
    ),
    "export, swapped": (
        lambda ctx, model, loader, batch: fx.export("runs/none", model),
        "CheckpointError: export(folder=...): a path is a string or a pathlib.Path, found Wrapped.",
    ),
}
