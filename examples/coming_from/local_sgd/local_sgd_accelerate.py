"""Classify images; on several ranks, replicas train independently between averages."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = convolutions()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model, optimizer, train = accelerator.prepare(model, optimizer, train)

for epoch in range(OPTIONS.epochs):
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local_sgd:
        for inputs, targets in train:
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
accelerator.print(norms(model.parameters()))
