"""Classify images, and record two updates with torch's profiler."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator, ProfileKwargs
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.profiler import tensorboard_trace_handler
from torch.utils.data import DataLoader

steps = {"wait": 1, "warmup": 1, "active": 2, "repeat": 1}
handler = tensorboard_trace_handler(OPTIONS.folder)
profile_kwargs = ProfileKwargs(schedule_option=steps, on_trace_ready=handler)
accelerator = Accelerator(kwargs_handlers=[profile_kwargs])
model = convolutions()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
model, optimizer, train = accelerator.prepare(model, optimizer, train)

with accelerator.profile() as trace:
    for epoch in range(OPTIONS.epochs):
        for inputs, targets in train:
            loss = F.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            trace.step()
accelerator.print(norms(model.parameters()))
