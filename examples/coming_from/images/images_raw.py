"""Classify images, with gradients clipped, and measure the accuracy after each epoch."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, held_out, images, norms
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = convolutions()
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, OPTIONS.epochs)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
tests = DataLoader(held_out(), batch_size=64)

for epoch in range(OPTIONS.epochs):
    model.train()
    for inputs, targets in train:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = F.cross_entropy(model(inputs), targets, label_smoothing=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()
    model.eval()
    right = 0
    for inputs, targets in tests:
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.no_grad():
            predictions = model(inputs).argmax(1)
        right += (predictions == targets).sum().item()
    accuracy = right / len(tests.dataset)
    print(f"epoch {epoch}: accuracy {accuracy:.3f}")
print([accuracy, *norms(model.parameters())])
