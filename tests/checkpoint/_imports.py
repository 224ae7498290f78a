"""A trained model, and an object that runs code when it is unpickled."""

import os

import torch
from torch import nn


def trained(seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)
