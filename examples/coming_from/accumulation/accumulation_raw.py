"""Classify images, with updates of four batches."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = convolutions()
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)

for epoch in range(OPTIONS.epochs):
    for number, batch in enumerate(train):
        inputs, targets = batch[0].to(device), batch[1].to(device)
        loss = F.cross_entropy(model(inputs), targets) / 4
        loss.backward()
        if (number + 1) % 4 == 0 or number + 1 == len(train):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
print(norms(model.parameters()))
