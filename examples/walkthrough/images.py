"""Photographs three times: a raw loop, the same loop with fxtrain, and `fx.fit`.

    python examples/walkthrough/images.py
    fxtrain launch --ranks 2 examples/walkthrough/images.py

From which of two photographs, which scikit-learn ships, is a gray crop of 16 × 16 pixels? Every
fourth crop is held out. The learning rate follows one cycle, and gradients of two micro-batches
make an update. Ends with one JSON line: the accuracy of each on held-out crops, and how far the
parameters of the other two are from those of the raw loop. These are in double precision: momentum
and many updates amplify the rounding of sums that ranks add in another order.
"""

import json
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import fxtrain as fx
from fxtrain import ops

EPOCHS, ROWS, ACCUMULATE, SIZE, LR = 5, 32, 2, 16, 1e-2
Batches = DataLoader[tuple[Tensor, ...]]


def data() -> tuple[Batches, Batches]:
    """Batches to train on and to test on: crops of (1, 16, 16) without their mean brightness."""
    images: list[Tensor] = []
    labels: list[Tensor] = []
    for label, photograph in enumerate(load_sample_images().images):
        gray = torch.tensor(photograph).double().mean(-1)[:416]
        tiles = gray.unfold(0, SIZE, SIZE).unfold(1, SIZE, SIZE).reshape(-1, 1, SIZE, SIZE)
        images.append((tiles - tiles.mean((2, 3), keepdim=True)) / 64)
        labels.append(torch.full((len(tiles),), label))
    order = torch.randperm(sum(map(len, labels)), generator=torch.Generator().manual_seed(0))
    train, test = (
        TensorDataset(torch.cat(images)[rows], torch.cat(labels)[rows])
        for rows in (order[len(order) // 4 :], order[: len(order) // 4])
    )
    return DataLoader(train, batch_size=ROWS, drop_last=True), DataLoader(test, batch_size=128)


def network() -> nn.Module:
    """(rows, 1, 16, 16) → (rows, 2), with the same values on every call."""
    torch.manual_seed(0)
    first = nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU()
    second = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU()
    layers = *first, *second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2)
    return nn.Sequential(*layers).double()


def raw() -> tuple[nn.Module, float]:
    """Torch alone."""
    loader, tests = data()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    scheduler = OneCycleLR(optimizer, 5 * LR, total_steps=EPOCHS * len(loader) // ACCUMULATE)
    for _ in range(EPOCHS):
        for number, (x, y) in enumerate(loader, start=1):
            loss = F.cross_entropy(net(x), y)
            (loss / ACCUMULATE).backward()
            if number % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    with torch.no_grad():
        hits = [net(x).argmax(1) == y for x, y in tests]
    return net, torch.cat(hits).float().mean().item()


def hits(net: fx.Wrapped, batch: fx.Batch[Any]) -> Tensor:
    """Which crops are classified correctly."""
    return net(batch[0]).argmax(1) == batch[1]


def kept(ctx: fx.DistContext) -> tuple[fx.Wrapped, float]:
    """The loop of `raw`, on any number of ranks."""
    loader, tests = data()
    plan = fx.Plan(accumulate=ACCUMULATE, clip_norm=1.0, batch="global")
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    scheduler = OneCycleLR(optimizer, 5 * LR, total_steps=EPOCHS * len(loader) // ACCUMULATE)
    net = fx.wrap(net, ctx, plan, optimizer=optimizer, scheduler=scheduler)
    for epoch in fx.shard(loader, ctx, plan).epochs(EPOCHS):
        for batch in epoch:
            x, y = batch
            loss = F.cross_entropy(net(x), y)
            fx.update(ctx, batch, net, loss)
    return net, fx.evaluate(ctx, net, tests, hits)


def fitted(ctx: fx.DistContext, folder: str) -> tuple[fx.Wrapped, float]:
    """The same, with checkpoints, a tracked curve, and a stop when nothing improves."""
    loader, tests = data()
    plan = fx.Plan(accumulate=ACCUMULATE, clip_norm=1.0, batch="global")
    loader = fx.shard(loader, ctx, plan)
    net = fx.wrap(
        network(),
        ctx,
        plan,
        optimizer=lambda params: torch.optim.SGD(params, lr=LR, momentum=0.9),
        scheduler=lambda opt: OneCycleLR(opt, 5 * LR, total_steps=loader.total_updates(EPOCHS)),
    )
    fns = fx.StepFns(model=net, loss=lambda net, batch: F.cross_entropy(net(batch[0]), batch[1]))
    state = {"stopping": fx.EarlyStopping(patience=EPOCHS, best="max")}
    with fx.fit(
        ctx,
        fns,
        loader,
        folder,
        epochs=EPOCHS,
        evaluate=lambda: fx.evaluate(ctx, net, tests, hits),
        extra=state,
    ) as reports:
        for report in reports:
            if report.metrics is not None:
                state["stopping"] = state["stopping"].update(report.metrics)
                if state["stopping"].due:
                    reports.stop()
    return net, fx.evaluate(ctx, net, tests, hits)


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
