"""Classify images until the loss on held-out rows has not improved for two epochs."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from shared import OPTIONS, SHUFFLE, convolutions, held_out, images, norms
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = convolutions()
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
tests = DataLoader(held_out(), batch_size=64)
model, optimizer, train, tests = accelerator.prepare(model, optimizer, train, tests)

best, waited = float("inf"), 0
for epoch in range(50):
    model.train()
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    total = 0.0
    with torch.no_grad():
        for inputs, targets in tests:
            outputs, targets = accelerator.gather_for_metrics((model(inputs), targets))
            total += F.cross_entropy(outputs, targets, reduction="sum").item()
    loss = total / len(tests.dataset)
    best, waited = (loss, 0) if loss < best else (best, waited + 1)
    if waited == 2:
        break
accelerator.print([epoch, *norms(model.parameters())])
