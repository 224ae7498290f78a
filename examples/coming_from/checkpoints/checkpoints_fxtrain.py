"""Classify images, and resume after the last finished epoch."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader

import fxtrain as fx

ctx, plan = fx.detect(), fx.Plan()
model = convolutions()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model = fx.wrap(model, ctx, plan, optimizer=optimizer)
train = fx.shard(train, ctx, plan)

if fx.latest(OPTIONS.folder):
    train = train.at(fx.restore(OPTIONS.folder, ctx, model).position)

for train in train.epochs(OPTIONS.epochs):
    for batch in train:
        inputs, targets = batch
        loss = F.cross_entropy(model(inputs), targets)
        fx.update(ctx, batch, model, loss)
    fx.save(OPTIONS.folder, ctx, model, position=batch.position)
fx.ops.say(norms(model.parameters()), ctx)
