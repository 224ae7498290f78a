"""Classify images, with gradients clipped, and measure the accuracy after each epoch."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from shared import OPTIONS, SHUFFLE, convolutions, held_out, images, norms
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = convolutions()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, OPTIONS.epochs)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
tests = DataLoader(held_out(), batch_size=64)
model, optimizer, train, tests = accelerator.prepare(model, optimizer, train, tests)

for epoch in range(OPTIONS.epochs):
    model.train()
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    model.eval()
    right = 0
    for inputs, targets in tests:
        with torch.no_grad():
            predictions = model(inputs).argmax(1)
        predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        right += (predictions == targets).sum().item()
    accuracy = right / len(tests.dataset)
    accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}")
accelerator.print([accuracy, *norms(model.parameters())])
