"""Classify images, with gradients clipped, and measure the accuracy after each epoch."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, held_out, images, norms
from torch.utils.data import DataLoader

import fxtrain as fx

ctx, plan = fx.detect(), fx.Plan(clip_norm=1.0)
model = convolutions()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, OPTIONS.epochs)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
tests = DataLoader(held_out(), batch_size=64)
model = fx.wrap(model, ctx, plan, optimizer=optimizer)

for train in fx.shard(train, ctx, plan).epochs(OPTIONS.epochs):
    model.train()
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
        fx.update(ctx, train.batch, model, loss)
    scheduler.step()
    accuracy = fx.evaluate(ctx, model, tests, lambda model, b: model(b[0]).argmax(1) == b[1])
    fx.ops.say(f"epoch {train.number}: accuracy {accuracy:.3f}", ctx)
fx.ops.say([accuracy, *norms(model.parameters())], ctx)
