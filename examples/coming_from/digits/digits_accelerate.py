"""Learn handwritten digits, as the MNIST example of PyTorch does, and save the weights."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from shared import OPTIONS, SHUFFLE, convolutions, held_out, images, norms
from torch.utils.data import DataLoader

accelerator = Accelerator()
model = convolutions()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
tests = DataLoader(held_out(), batch_size=64)
model, optimizer, train, tests = accelerator.prepare(model, optimizer, train, tests)

for epoch in range(OPTIONS.epochs):
    model.train()
    for inputs, targets in train:
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()

model.eval()
right = 0
with torch.no_grad():
    for inputs, targets in tests:
        predictions = model(inputs).argmax(1)
        predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        right += (predictions == targets).sum().item()
accuracy = right / len(tests.dataset)
accelerator.wait_for_everyone()
accelerator.save_model(model, OPTIONS.folder)
accelerator.print([accuracy, *norms(model.parameters())])
