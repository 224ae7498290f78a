"""Classify images until the loss on held-out rows has not improved for two epochs."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, held_out, images, norms
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = convolutions()
model.to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
tests = DataLoader(held_out(), batch_size=64)

best, waited = float("inf"), 0
for epoch in range(50):
    model.train()
    for inputs, targets in train:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    total = 0.0
    with torch.no_grad():
        for inputs, targets in tests:
            inputs, targets = inputs.to(device), targets.to(device)
            total += F.cross_entropy(model(inputs), targets, reduction="sum").item()
    loss = total / len(tests.dataset)
    best, waited = (loss, 0) if loss < best else (best, waited + 1)
    if waited == 2:
        break
print([epoch, *norms(model.parameters())])
