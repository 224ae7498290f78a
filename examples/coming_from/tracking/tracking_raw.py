"""Classify images, and log the mean loss of each epoch to TensorBoard."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader
from torch.utils.tensorboard import SummaryWriter

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = convolutions()
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
writer = SummaryWriter(OPTIONS.folder)

for epoch in range(OPTIONS.epochs):
    total = 0.0
    for inputs, targets in train:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = F.cross_entropy(model(inputs), targets)
        total += loss.detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    writer.add_scalar("loss", total / len(train), epoch)
writer.close()
print(norms(model.parameters()))
