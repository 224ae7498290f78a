"""Learn handwritten digits, as the MNIST example of PyTorch does, and save the weights."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, held_out, images, norms
from torch.utils.data import DataLoader

import fxtrain as fx

ctx = fx.detect()
model = convolutions()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
tests = DataLoader(held_out(), batch_size=64)
model = fx.wrap(model, ctx, optimizer=optimizer)

for train in fx.shard(train, ctx).epochs(OPTIONS.epochs):
    model.train()
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets)
        fx.update(ctx, train.batch, model, loss)
    scheduler.step()

accuracy = fx.evaluate(ctx, model, tests, lambda model, b: model(b[0]).argmax(1) == b[1])
fx.export(model, OPTIONS.folder)
fx.ops.say([accuracy, *norms(model.parameters())], ctx)
