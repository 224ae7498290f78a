"""Classify images, and log the mean loss of each epoch to TensorBoard."""

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
writer = fx.track(OPTIONS.folder, ctx, [fx.TensorBoard()])

for train in fx.shard(train, ctx).epochs(OPTIONS.epochs):
    mean = fx.Mean()
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets)
        mean = mean.update(fx.update(ctx, train.batch, model, loss))
    writer.log({"loss": mean.reduce(ctx)}, train.number)
writer.close()
fx.ops.say(norms(model.parameters()), ctx)
