"""Classify images, and log the mean loss of each epoch to TensorBoard."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader

accelerator = Accelerator(log_with="tensorboard", project_dir=OPTIONS.folder)
model = convolutions()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model, optimizer, train = accelerator.prepare(model, optimizer, train)
accelerator.init_trackers("images")

for epoch in range(OPTIONS.epochs):
    total = 0.0
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets)
        total += loss.detach()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    total = accelerator.reduce(total, reduction="mean")
    accelerator.log({"loss": total / len(train)}, step=epoch)
accelerator.end_training()
accelerator.print(norms(model.parameters()))
