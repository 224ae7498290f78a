"""Estimate the accuracy of a classifier by cross validation in four folds."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, images
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Subset

import fxtrain as fx

ctx = fx.detect()
rows, scores = images(), []

for fit_rows, test_rows in KFold(4).split(range(len(rows))):
    model = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = DataLoader(Subset(rows, fit_rows), batch_size=OPTIONS.size, shuffle=SHUFFLE)
    tests = DataLoader(Subset(rows, test_rows), batch_size=24)
    model = fx.wrap(model, ctx, optimizer=optimizer)
    for train in fx.shard(train, ctx).epochs(OPTIONS.epochs):
        for inputs, targets in train:
            loss = F.cross_entropy(model(inputs), targets)
            fx.update(ctx, train.batch, model, loss)
    scores.append(fx.evaluate(ctx, model, tests, lambda model, b: model(b[0]).argmax(1) == b[1]))
fx.ops.say([sum(scores) / len(scores), *scores], ctx)
