"""Classify images; on several ranks, gradients are sent in half precision."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.utils.data import DataLoader

ddp_kwargs = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
accelerator = Accelerator(kwargs_handlers=[ddp_kwargs])
model = convolutions()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model, optimizer, train = accelerator.prepare(model, optimizer, train)

for epoch in range(OPTIONS.epochs):
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
accelerator.print(norms(model.parameters()))
