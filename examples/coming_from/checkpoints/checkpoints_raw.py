"""Classify images, and resume after the last finished epoch."""

import os

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = convolutions()
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)

start, path = 0, os.path.join(OPTIONS.folder, "last.pt")
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["epoch"]

for epoch in range(start, OPTIONS.epochs):
    for batch in train:
        inputs, targets = batch[0].to(device), batch[1].to(device)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    os.makedirs(OPTIONS.folder, exist_ok=True)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "epoch": epoch + 1}, path)
print(norms(model.parameters()))
