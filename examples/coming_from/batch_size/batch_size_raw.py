"""Find the largest batch size that fits into memory; an update keeps its number of rows."""

import torch
import torch.nn.functional as F
from shared import OPTIONS, SHUFFLE, OutOfMemoryAbove, convolutions, images, norms
from torch.utils.data import DataLoader

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
size = OPTIONS.size


def fit(size):
    model = convolutions()
    model.to(device)
    model.register_forward_pre_hook(OutOfMemoryAbove(OPTIONS.size // 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = DataLoader(images(), batch_size=size, shuffle=SHUFFLE)
    every = OPTIONS.size // size
    for epoch in range(OPTIONS.epochs):
        for number, batch in enumerate(train):
            inputs, targets = batch[0].to(device), batch[1].to(device)
            loss = F.cross_entropy(model(inputs), targets) / every
            loss.backward()
            if (number + 1) % every == 0:
                optimizer.step()
                optimizer.zero_grad()
    return model


while True:
    try:
        model = fit(size)
        break
    except torch.OutOfMemoryError:
        size //= 2
print([size / OPTIONS.size, *norms(model.parameters())])
