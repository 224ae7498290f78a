"""Classify images; on several ranks, gradients are sent in half precision."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = convolutions()
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)

for epoch in range(OPTIONS.epochs):
    for inputs, targets in train:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(norms(model.parameters()))
