"""Find the largest batch size that fits into memory; an update keeps its number of rows."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, OutOfMemoryAbove, convolutions, images, norms
from torch.utils.data import DataLoader

import fxtrain as fx

ctx = fx.detect()


def fit(size, plan, epochs=1):
    model = convolutions()
    model.register_forward_pre_hook(OutOfMemoryAbove(OPTIONS.size // 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = DataLoader(images(), batch_size=size, shuffle=SHUFFLE)
    model = fx.wrap(model, ctx, plan, optimizer=optimizer)
    for train in fx.shard(train, ctx, plan).epochs(epochs):
        for batch in train:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            fx.update(ctx, batch, model, loss)
    return model


size, plan = fx.tuning.find_batch_size(ctx, fit, OPTIONS.size)
model = fit(size, plan, OPTIONS.epochs)
fx.ops.say([size / OPTIONS.size, *norms(model.parameters())], ctx)
