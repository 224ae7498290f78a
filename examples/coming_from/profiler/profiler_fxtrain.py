"""Classify images, and record two updates with torch's profiler."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader

import fxtrain as fx

ctx = fx.detect()
model = convolutions()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model = fx.wrap(model, ctx, optimizer=optimizer)

with fx.profile(ctx, fx.Profile(folder=OPTIONS.folder, active=2)) as trace:
    for train in fx.shard(train, ctx).epochs(OPTIONS.epochs):
        for inputs, targets in train:
            loss = F.cross_entropy(model(inputs), targets)
            fx.update(ctx, train.batch, model, loss)
            trace.step()
fx.ops.say(norms(model.parameters()), ctx)
