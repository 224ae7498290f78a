"""Handwritten digits three times: a raw loop, the same loop with fxtrain, and `fx.fit`.

    python examples/walkthrough/digits.py
    fxtrain launch --ranks 2 examples/walkthrough/digits.py

`raw` is torch alone, on one process. `kept` is that loop with six lines changed, on any number of
ranks. `fitted` also resumes, saves, evaluates and tracks. Ends with one JSON line: the accuracy of
each, and how far the trained parameters of the other two are from those of `raw`.
"""

import json
import tempfile

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

EPOCHS = 3
Batches = DataLoader[tuple[Tensor, ...]]


def data() -> tuple[Batches, Batches]:
    """1504 rows to train on, in a fixed order, and 293 to test on."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    train, test = TensorDataset(x[:1504], y[:1504]), TensorDataset(x[1504:], y[1504:])
    return DataLoader(train, batch_size=32), DataLoader(test, batch_size=64)


def network() -> nn.Module:
    """(rows, 1, 8, 8) → (rows, 10), with the same values on every call."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*convolution, nn.Flatten(), nn.Linear(256, 10))


def raw() -> tuple[nn.Module, float]:
    """Torch alone."""
    loader, tests = data()
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    for _ in range(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        hits = [net(x).argmax(1) == y for x, y in tests]
    return net, torch.cat(hits).float().mean().item()


def kept(ctx: fx.DistContext) -> tuple[fx.Wrapped, float]:
    """The loop of `raw`, on any number of ranks."""
    loader, tests = data()
    plan = fx.Plan(clip_norm=1.0, batch="global")  # 32 rows of all ranks together
    net = network()
    net = fx.wrap(net, ctx, plan, optimizer=torch.optim.AdamW(net.parameters(), lr=5e-3))
    for epoch in fx.shard(loader, ctx, plan).epochs(EPOCHS):
        for batch in epoch:
            x, y = batch
            loss = F.cross_entropy(net(x), y)
            fx.update(ctx, batch, net, loss)
    return net, fx.evaluate(ctx, net, tests, lambda net, batch: net(batch[0]).argmax(1) == batch[1])


def fitted(ctx: fx.DistContext, folder: str) -> tuple[fx.Wrapped, float]:
    """The same, with checkpoints, a held-out score after each epoch, and a tracked curve."""
    loader, tests = data()
    plan = fx.Plan(clip_norm=1.0, batch="global")
    net = network()
    net = fx.wrap(net, ctx, plan, optimizer=torch.optim.AdamW(net.parameters(), lr=5e-3))
    fns = fx.StepFns(model=net, loss=lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]))

    def score() -> float:
        return fx.evaluate(ctx, net, tests, lambda net, rows: net(rows[0]).argmax(1) == rows[1])

    for report in fx.fit(
        ctx,
        fns,
        fx.shard(loader, ctx, plan),
        folder,
        epochs=EPOCHS,
        evaluate=score,
        keep_best=1,
        best="max",
    ):
        if report.metrics is not None:
            ops.say(f"epoch {report.position.epoch}: accuracy {report.metrics:.3f}", ctx)
    return net, score()


def main(ctx: fx.DistContext) -> dict[str, float]:
    net, accuracy = raw()
    told = {"raw": accuracy}
    with tempfile.TemporaryDirectory() as own:
        folder = ops.broadcast_object(own, ctx)
        for name, (model, score) in {"kept": kept(ctx), "fitted": fitted(ctx, folder)}.items():
            pairs = zip(net.parameters(), model.parameters(), strict=True)
            apart = max((a - b.cpu()).abs().max().item() for a, b in pairs)
            told |= {name: score, f"{name}_apart": apart}
        ops.barrier(ctx)  # rank 0's folder is that of all
    return told


if __name__ == "__main__":
    with fx.detect() as ctx:
        ops.say(json.dumps({"ranks": ctx.world_size, **main(ctx)}), ctx)
