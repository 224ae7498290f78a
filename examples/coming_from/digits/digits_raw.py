"""Learn handwritten digits, as the MNIST example of PyTorch does, and save the weights."""

import os

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, convolutions, held_out, images, norms
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = convolutions()
model.to(device)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
train = DataLoader(images(), batch_size=OPTIONS.size, shuffle=SHUFFLE)
tests = DataLoader(held_out(), batch_size=64)

for epoch in range(OPTIONS.epochs):
    model.train()
    for inputs, targets in train:
        inputs, targets = inputs.to(device), targets.to(device)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()

model.eval()
right = 0
with torch.no_grad():
    for inputs, targets in tests:
        inputs, targets = inputs.to(device), targets.to(device)
        predictions = model(inputs).argmax(1)
        right += (predictions == targets).sum().item()
accuracy = right / len(tests.dataset)
os.makedirs(OPTIONS.folder, exist_ok=True)
torch.save(model.state_dict(), os.path.join(OPTIONS.folder, "digits.pt"))
print([accuracy, *norms(model.parameters())])
