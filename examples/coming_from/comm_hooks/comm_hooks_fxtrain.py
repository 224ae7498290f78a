"""Classify images; on several ranks, gradients are sent in half precision."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader

import fxtrain as fx

ctx, plan = fx.detect(), fx.Plan(strategy=fx.DDP(hook=fx.CommHook(name="fp16")))
model = convolutions()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model = fx.wrap(model, ctx, plan, optimizer=optimizer)

for train in fx.shard(train, ctx, plan).epochs(OPTIONS.epochs):
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets)
        fx.update(ctx, train.batch, model, loss)
fx.ops.say(norms(model.parameters()), ctx)
