"""Find the largest batch size that fits into memory; an update keeps its number of rows."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import find_executable_batch_size
from shared import OPTIONS, SHUFFLE, OutOfMemoryAbove, convolutions, images, norms
from torch.utils.data import DataLoader


@find_executable_batch_size(starting_batch_size=OPTIONS.size)
def fit(size):
    accelerator = Accelerator(gradient_accumulation_steps=OPTIONS.size // size)
    model = convolutions()
    model.register_forward_pre_hook(OutOfMemoryAbove(OPTIONS.size // 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = DataLoader(images(), batch_size=size, shuffle=SHUFFLE)
    model, optimizer, train = accelerator.prepare(model, optimizer, train)
    for epoch in range(OPTIONS.epochs):
        for inputs, targets in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    accelerator.print([size / OPTIONS.size, *norms(model.parameters())])


fit()
