"""Arguments in the wrong place: the line to write instead, the same on every rank."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fxtrain as fx


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def _loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


# What is called, with a context, a model, its loader and a batch, and words of the error.
WRONG = {
    "step, swapped": (
        lambda ctx, model, loader, batch: fx.step(ctx, fx.StepFns(model, _loss), batch),
        "StepError: step(ctx, batch, fns) takes a context, a batch and a model with its loss; "
        "found DistContext, StepFns, Batch. Use fx.step(ctx, batch, fx.StepFns(model, loss)).",
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
        "StepError: ops.schedule takes a wrapped model, found float. Use model = fx.wrap(",
    ),
    "backward, swapped": (
        lambda ctx, model, loader, batch: fx.ops.backward(model, _loss(model, batch)),
        "StepError: ops.backward takes a wrapped model, found Tensor.",
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
        "wrap: ctx is missing. Use wrap(model, ctx).",
    ),
    "StepFns, no loss": (
        lambda ctx, model, loader, batch: fx.StepFns(model),
        "StepFns: loss is missing. Use StepFns(model, loss).",
    ),
    "fit, no epochs": (
        lambda ctx, model, loader, batch: fx.fit(ctx, fx.StepFns(model, _loss), loader),
        "fit: path and epochs are missing. Use fit(ctx, fns, loader, path, epochs=...).",
    ),
    "fit, epochs as text": (
        lambda ctx, model, loader, batch: next(
            fx.fit(ctx, fx.StepFns(model, _loss), loader, "runs/none", epochs="1")
        ),
        "PlanError: fit(epochs='1'): choose a whole number.",
    ),
    "step, no context": (
        lambda ctx, model, loader, batch: fx.step(None, batch, fx.StepFns(model, _loss)),
        "ContextError: step: ctx is a NoneType, not a context from fx.detect(). Use fx.step(ctx,",
    ),
    "save, swapped": (
        lambda ctx, model, loader, batch: fx.save(ctx, "runs/none", model),
        "ContextError: save: ctx is a str, not a context from fx.detect(). Use fx.save(folder, ctx",
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
    "a key as an attribute": (
        lambda ctx, model, loader, batch: batch.x,
        "AttributeError: A batch has no attribute 'x'. Use batch['x'].",
    ),
    "another attribute": (
        lambda ctx, model, loader, batch: batch.shape,
        "AttributeError: A batch has no attribute 'shape'. Use batch.data.shape, if the data, a "
        "dict, has it.",
    ),
}


def _said(ctx):
    """The error of each call on this rank."""
    net = nn.Sequential(nn.Linear(2, 2))
    model = fx.wrap(net, ctx, optimizer=_sgd, scheduler=_plateau)
    rows = [{"x": torch.ones(2), "y": n % 2} for n in range(8)]
    loader = fx.shard(DataLoader(rows, batch_size=2), ctx)
    batch = next(iter(loader))
    said = {}
    for name, (call, _) in WRONG.items():
        try:
            call(ctx, model, loader, batch)
        except (fx.FxError, AttributeError) as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.mark.parametrize("n", [1, 2])
def test_the_line_to_write_is_said_on_every_rank(clusters, n):
    first, *others = clusters[n].run(_said)
    assert [name for name in WRONG if WRONG[name][1] not in first.get(name, "")] == []
    assert all(other == first for other in others)


def test_a_batch_is_a_mapping_with_get(ctx_of_one):
    rows = [{"x": torch.ones(2)}] * 2
    (batch,) = fx.shard(DataLoader(rows, batch_size=2), ctx_of_one)
    assert batch.get("x").shape == (2, 2)
    assert batch.get("z") is None and batch.get("z", 3) == 3
    (batch,) = fx.shard(DataLoader(torch.ones(2, 2), batch_size=2), ctx_of_one)
    with pytest.raises(TypeError, match=r"batch\.get\(\), or \*\*batch: the data of this batch"):
        batch.get("x")


def test_a_loader_has_the_batch_that_it_yielded_last(ctx_of_one):
    loader = fx.shard(DataLoader(torch.arange(10), batch_size=4), ctx_of_one)
    for epoch in loader.epochs(2):
        assert all(batch is epoch.batch for batch in epoch)
        assert epoch.batch.position.is_last


@pytest.fixture
def ctx_of_one():
    with fx.detect({}, device="cpu") as opened:
        yield opened
