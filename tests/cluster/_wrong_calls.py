"""Arguments in the wrong place, and what the error of each says."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx
from tests.cluster._wrong_step_calls import WRONG_STEPS

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
        "StepArgumentError: step(ctx, batch, fns) takes a context, a batch and a model with its "
        "loss; found DistContext, StepFns, Batch. Use fx.step(ctx, batch, fx.StepFns(model, ",
    ),
    "step, a model": (
        lambda ctx, model, loader, batch: fx.step(ctx, batch, model),
        "found DistContext, Batch, Wrapped. Use fx.step(ctx, batch, fx.StepFns(model, loss)).",
    ),
    "update, the loader": (
        lambda ctx, model, loader, batch: fx.update(ctx, loader, model, _loss(model, batch)),
        "StepError: update takes a Batch, found its loader. Use loader.batch, which is the batch",
    ),
    "batch, too early": (
        lambda ctx, model, loader, batch: loader.at(batch.position).batch,
        "DataError: batch: this loader has yielded no batch yet. Iterate it first.",
    ),
    "schedule, swapped": (
        lambda ctx, model, loader, batch: fx.ops.schedule(model, 0.5),
        "schedule: arguments in the wrong order, found Wrapped, float. Use fx.ops.schedule(metric,",
    ),
    "backward, swapped": (
        lambda ctx, model, loader, batch: fx.ops.backward(model, _loss(model, batch)),
        "backward: arguments in the wrong order, found Wrapped, Tensor. Use fx.ops.backward(loss,",
    ),
    "clip_norm, a module": (
        lambda ctx, model, loader, batch: fx.ops.clip_norm(model.module, 1.0),
        "StepError: ops.clip_norm takes a wrapped model, found Sequential.",
    ),
    "a criterion": (
        lambda ctx, model, loader, batch: fx.StepFns(model, nn.CrossEntropyLoss()),
        "StepError: StepFns(loss=nn.CrossEntropyLoss()): this function takes (model, batch), and "
        "nn.CrossEntropyLoss() takes outputs and targets. Use lambda model, batch: "
        "criterion(model(batch[0]), batch[1]), where criterion = nn.CrossEntropyLoss().",
    ),
    "a class of criteria": (
        lambda ctx, model, loader, batch: fx.StepFns(model, nn.CrossEntropyLoss),
        "batch[1]), where criterion = nn.CrossEntropyLoss().",
    ),
    "a function of torch": (
        lambda ctx, model, loader, batch: fx.StepFns(model, F.mse_loss),
        "Use lambda model, batch: F.mse_loss(model(batch[0]), batch[1]).",
    ),
    "evaluate, a criterion": (
        lambda ctx, model, loader, batch: fx.evaluate(ctx, model, loader, nn.MSELoss()),
        "StepError: evaluate(fn=nn.MSELoss()): this function takes (model, batch)",
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
    "detect, cpu": (
        lambda ctx, model, loader, batch: fx.detect(cpu=True),
        'detect(cpu=...): no such argument. Use fx.detect(device="cpu").',
    ),
    "detect, a device": (
        lambda ctx, model, loader, batch: fx.detect("cpu"),
        "ContextError: detect(env='cpu'): not a mapping of environment variables. Name the device "
        'as fx.detect(device="cpu").',
    ),
    "detect, a dict": (
        lambda ctx, model, loader, batch: fx.detect(mesh={"tensor": 2}),
        "For example: fx.detect(mesh=fx.Mesh(tensor=2)).",
    ),
    "wrap, no context": (
        lambda ctx, model, loader, batch: fx.wrap(nn.Linear(2, 2)),
        "wrap: ctx is missing. Use fx.wrap(model, ctx), with ctx = fx.detect().",
    ),
    "preemption, a model": (
        lambda ctx, model, loader, batch: fx.preemption(model).__enter__(),
        "ContextError: preemption: ctx is a Wrapped, not a context from fx.detect().",
    ),
    "StepFns, no loss": (
        lambda ctx, model, loader, batch: fx.StepFns(model),
        "StepFns: loss is missing. Use fx.StepFns(model, loss).",
    ),
    "fit, no epochs": (
        lambda ctx, model, loader, batch: fx.fit(ctx, fx.StepFns(model, _loss), loader),
        "fit: path is missing. Use fx.fit(ctx, fx.StepFns(model, loss), loader, path).",
    ),
    "fit, epochs as text": (
        lambda ctx, model, loader, batch: next(
            fx.fit(ctx, fx.StepFns(model, _loss), loader, "runs/none", epochs="1")
        ),
        "PlanError: fit(epochs='1'): choose a whole number or None.",
    ),
    "step, no context": (
        lambda ctx, model, loader, batch: fx.step(None, batch, fx.StepFns(model, _loss)),
        "ContextError: step: ctx is a NoneType, not a context from fx.detect(). Use fx.step(ctx,",
    ),
    "save, swapped": (
        lambda ctx, model, loader, batch: fx.save(ctx, "runs/none", model),
        "save: arguments in the wrong order, found DistContext, str, Wrapped. Use fx.save(path",
    ),
    "one argument too many": (
        lambda ctx, model, loader, batch: fx.Plan("bf16"),
        "Plan: 1 positional argument too many. Pass Plan(strategy=...) and what follows by name.",
    ),
    "precision, torch's": (
        lambda ctx, model, loader, batch: fx.Plan(precision=torch.bfloat16),
        'or an fx.Precision(...). Use precision="bf16".',
    ),
    "compile, a mode": (
        lambda ctx, model, loader, batch: fx.Plan(compile="max-autotune"),
        'Use compile=fx.Compile(mode="max-autotune").',
    ),
    "set_epoch": (
        lambda ctx, model, loader, batch: loader.sampler.set_epoch(1),
        "AttributeError: A sharded loader has no attribute 'sampler'. Use loader.epochs(3).",
    ),
    "step, no context at all": (
        lambda ctx, model, loader, batch: fx.step(batch, fx.StepFns(model, _loss)),
        "found Batch, StepFns. Use fx.step(ctx, batch, fx.StepFns(model, loss)).",
    ),
    "step, as update": (
        lambda ctx, model, loader, batch: fx.step(ctx, batch, model, _loss),
        "found DistContext, Batch, Wrapped, function. Use fx.step(ctx, batch, fx.StepFns(",
    ),
    "step, by name": (
        lambda ctx, model, loader, batch: fx.step(ctx, batch, model=model, loss=_loss),
        "found DistContext, Batch, model=Wrapped, loss=function. Use fx.step(ctx, batch, fx.",
    ),
    "step, an epoch": (
        lambda ctx, model, loader, batch: fx.step(
            ctx, next(iter(loader.epochs(9))), fx.StepFns(model, _loss)
        ),
        "found the loader of an epoch. Use `for epoch in loader.epochs(n): for batch in epoch: fx.",
    ),
    "step, a loss of one argument": (
        lambda ctx, model, loader, batch: fx.step(ctx, batch, fx.StepFns(model, lambda batch: 1)),
        "StepError: StepFns(loss=...) takes a function; it is called with (model, batch): too many "
        "positional arguments. For example: loss=lambda model, batch: F.cross_entropy(",
    ),
    "an epoch, indexed": (
        lambda ctx, model, loader, batch: next(iter(loader.epochs(9)))["x"],
        "DataError: loader['x']: a loader has batches, and this is not one. Use `for epoch in",
    ),
    "update, no context": (
        lambda ctx, model, loader, batch: fx.update(batch, model, _loss(model, batch)),
        "found Batch, Wrapped, Tensor. Use fx.update(ctx, batch, model, loss), where model = ",
    ),
    "update, the optimizer too": (
        lambda ctx, model, loader, batch: fx.update(
            ctx, batch, model, _loss(model, batch), model.optimizer
        ),
        "found DistContext, Batch, Wrapped, Tensor, SGD. Use fx.update(ctx, batch, model, loss)",
    ),
    "wrap, a plan for a context": (
        lambda ctx, model, loader, batch: fx.wrap(nn.Linear(2, 2), fx.Plan()),
        "wrap: ctx is missing. Use fx.wrap(model, ctx, plan), with ctx = fx.detect().",
    ),
    "wrap, swapped": (
        lambda ctx, model, loader, batch: fx.wrap(ctx, nn.Linear(2, 2), fx.Plan()),
        "wrap: arguments in the wrong order, found DistContext, Linear, Plan. Use fx.wrap(model,",
    ),
    "wrap, a field of the plan": (
        lambda ctx, model, loader, batch: fx.wrap(nn.Linear(2, 2), ctx, precision="bf16"),
        "wrap(precision=...): no such argument. It is a field of the plan: use fx.Plan(precision=",
    ),
    "wrap, a factory without arguments": (
        lambda ctx, model, loader, batch: fx.wrap(nn.Linear(2, 2), ctx, optimizer=lambda: None),
        "PlanError: wrap(optimizer=...) takes a factory; it is called with (params): too many",
    ),
    "wrap, a class of schedulers": (
        lambda ctx, model, loader, batch: fx.wrap(
            nn.Linear(2, 2), ctx, optimizer=sgd, scheduler=torch.optim.lr_scheduler.StepLR
        ),
        "it is called with (optimizer): missing a required argument: 'step_size'. For example: ",
    ),
    "shard, swapped": (
        lambda ctx, model, loader, batch: fx.shard(ctx, DataLoader([1])),
        "shard: arguments in the wrong order, found DistContext, DataLoader. Use fx.shard(loader,",
    ),
    "evaluate, no context": (
        lambda ctx, model, loader, batch: fx.evaluate(model, loader, _loss),
        "evaluate: ctx is missing. Use fx.evaluate(ctx, model, loader, fn), with ctx = fx.detect()",
    ),
    "evaluate, swapped": (
        lambda ctx, model, loader, batch: fx.evaluate(ctx, loader, model, _loss),
        "evaluate: arguments in the wrong order, found DistContext, Sharded, Wrapped, function. ",
    ),
    "evaluate, of the batch alone": (
        lambda ctx, model, loader, batch: fx.evaluate(ctx, model, loader, lambda batch: 1.0),
        "DataError: evaluate(fn=...) takes a function; it is called with (model, batch): too many",
    ),
    "fit, swapped": (
        lambda ctx, model, loader, batch: fx.fit(
            "runs/none", ctx, fx.StepFns(model, _loss), loader, epochs=1
        ),
        "fit: arguments in the wrong order, found str, DistContext, StepFns, Sharded. Use fx.fit(",
    ),
    "fit, a model": (
        lambda ctx, model, loader, batch: fx.fit(ctx, model, loader, "runs/none", epochs=1),
        "fit: fns is missing. Use fx.fit(ctx, fx.StepFns(model, loss), loader, path).",
    ),
    "fit, Lightning's epochs": (
        lambda ctx, model, loader, batch: fx.fit(ctx, None, loader, "runs/none", max_epochs=1),
        "fit(max_epochs=...): no such argument. Use fit(epochs=3).",
    ),
    "save, no context": (
        lambda ctx, model, loader, batch: fx.save(model, "runs/none"),
        "save: ctx is missing. Use fx.save(path, ctx, model), with ctx = fx.detect().",
    ),
    "restore, the model first": (
        lambda ctx, model, loader, batch: fx.restore(model, "runs/none", ctx),
        "restore: arguments in the wrong order, found Wrapped, str, DistContext. Use fx.restore(",
    ),
    "load": (
        lambda ctx, model, loader, batch: fx.load("runs/none", ctx, model),
        "module 'fxtrain' has no attribute 'load'. Use fx.restore(\"runs/a\", ctx, model)",
    ),
    "export, swapped": (
        lambda ctx, model, loader, batch: fx.export("runs/none", model),
        "export: arguments in the wrong order, found str, Wrapped. Use fx.export(model, folder).",
    ),
    "close, a model": (
        lambda ctx, model, loader, batch: fx.close(model),
        "close: ctx is missing. Use fx.close(ctx), with ctx = fx.detect().",
    ),
    "autocast, torch's": (
        lambda ctx, model, loader, batch: fx.ops.autocast("cuda", dtype=torch.bfloat16),
        "found str, dtype=dtype. Use fx.ops.autocast(model), where model = fx.wrap(net, ctx, fx.Pl",
    ),
    "sync, by position": (
        lambda ctx, model, loader, batch: fx.ops.sync(model, False),
        "sync: 1 positional argument too many. Pass sync(enabled=...) and what follows by name.",
    ),
    "mesh, other names": (
        lambda ctx, model, loader, batch: fx.Mesh(tp=2),
        "Mesh(tp=...): no such argument. Use Mesh(tensor=2).",
    ),
    "a key as an attribute": (
        lambda ctx, model, loader, batch: batch.x,
        "AttributeError: A batch has no attribute 'x'. Use batch['x'].",
    ),
    "another attribute": (
        lambda ctx, model, loader, batch: batch.shape,
        "AttributeError: A batch has no attribute 'shape'. Use batch.data.shape, if the data, a "
        "dict, has it.",
    ),
    **WRONG_STEPS,
}
