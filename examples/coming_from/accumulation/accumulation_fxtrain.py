"""Classify images, with updates of four batches."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader

import fxtrain as fx

ctx, plan = fx.detect(), fx.Plan(accumulate=4, clip_norm=0.5)
model = convolutions()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model = fx.wrap(model, ctx, plan, optimizer=optimizer)

for train in fx.shard(train, ctx, plan).epochs(OPTIONS.epochs):
    for batch in train:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        fx.update(ctx, batch, model, loss)
fx.ops.say(norms(model.parameters()), ctx)
