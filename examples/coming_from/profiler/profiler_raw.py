"""Classify images, and record two updates with torch's profiler."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, images, norms
from torch.profiler import profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = convolutions()
model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)

steps = schedule(wait=1, warmup=1, active=2, repeat=1)
with profile(schedule=steps, on_trace_ready=tensorboard_trace_handler(OPTIONS.folder)) as trace:
    for epoch in range(OPTIONS.epochs):
        for inputs, targets in train:
            inputs, targets = inputs.to(device), targets.to(device)
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trace.step()
print(norms(model.parameters()))
