"""Classify images, and resume after the last finished epoch."""

import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = convolutions()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model, optimizer, train = accelerator.prepare(model, optimizer, train)

start = 0
if os.path.exists(OPTIONS.folder):
    start = max(int(name.split("_")[1]) for name in os.listdir(OPTIONS.folder))
    accelerator.load_state(os.path.join(OPTIONS.folder, f"epoch_{start}"))

for epoch in range(start, OPTIONS.epochs):
    for batch in train:
        inputs, targets = batch
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(os.path.join(OPTIONS.folder, f"epoch_{epoch + 1}"))
accelerator.print(norms(model.parameters()))
