"""Estimate the accuracy of a classifier by cross validation in four folds."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, images
from sklearn.model_selection import KFold
from torch.utils.data import DataLoader, Subset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
rows, scores = images(), []

for fit_rows, test_rows in KFold(4).split(range(len(rows))):
    model = convolutions()
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = DataLoader(Subset(rows, fit_rows), batch_size=OPTIONS.size, shuffle=SHUFFLE)
    tests = DataLoader(Subset(rows, test_rows), batch_size=24)
    for epoch in range(OPTIONS.epochs):
        for inputs, targets in train:
            inputs, targets = inputs.to(device), targets.to(device)
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    right = 0
    with torch.no_grad():
        for inputs, targets in tests:
            inputs, targets = inputs.to(device), targets.to(device)
            predictions = model(inputs).argmax(1)
            right += (predictions == targets).sum().item()
    scores.append(right / len(test_rows))
print([sum(scores) / len(scores), *scores])
