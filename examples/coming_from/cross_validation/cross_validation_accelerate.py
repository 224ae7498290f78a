"""Estimate the accuracy of a classifier by cross validation in four folds."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from shared import OPTIONS, SHUFFLE, convolutions, images
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Subset

accelerator = Accelerator()
rows, scores = images(), []

for fit_rows, test_rows in KFold(4).split(range(len(rows))):
    model = convolutions()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = DataLoader(Subset(rows, fit_rows), batch_size=OPTIONS.size, shuffle=SHUFFLE)
    tests = DataLoader(Subset(rows, test_rows), batch_size=24)
    model, optimizer, train, tests = accelerator.prepare(model, optimizer, train, tests)
    for epoch in range(OPTIONS.epochs):
        for inputs, targets in train:
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    with torch.no_grad():
        for inputs, targets in tests:
            predictions = model(inputs).argmax(1)
            predictions, targets = accelerator.gather_for_metrics((predictions, targets))
            right += (predictions == targets).sum().item()
    scores.append(right / len(test_rows))
    model, optimizer, train, tests = accelerator.free_memory(model, optimizer, train, tests)
accelerator.print([sum(scores) / len(scores), *scores])
