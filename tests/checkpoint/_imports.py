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


def by_name(entry, _):
    """How Python 3.11.0 to 3.11.3 pickle an entry of an enumeration."""
    return getattr, (type(entry), entry._name_)


class Attribute:
    """Pickled as an attribute of another object."""

    def __init__(self, of, name):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)
