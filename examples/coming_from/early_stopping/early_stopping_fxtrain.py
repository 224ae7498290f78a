"""Classify images until the loss on held-out rows has not improved for two epochs."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, held_out, images, norms
from torch.utils.data import DataLoader

import fxtrain as fx

ctx = fx.detect()
model = convolutions()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
tests = DataLoader(held_out(), batch_size=64)
model = fx.wrap(model, ctx, optimizer=optimizer)

best, waited = float("inf"), 0
for train in fx.shard(train, ctx).epochs(50):
    model.train()
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets)
        fx.update(ctx, train.batch, model, loss)
    loss = fx.evaluate(ctx, model, tests, lambda model, b: F.cross_entropy(model(b[0]), b[1]))
    best, waited = (loss, 0) if loss < best else (best, waited + 1)
    if waited == 2:
        break
fx.ops.say([train.number, *norms(model.parameters())], ctx)  # pyright: ignore
