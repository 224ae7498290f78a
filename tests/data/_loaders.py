"""One loader per rank, over contexts made by hand: no processes."""

from torch.utils.data import DataLoader

import fxtrain as fx
from fxtrain.state import DistContext


def world(n):
    return [DistContext(rank=rank, world_size=n) for rank in range(n)]


def loaders(dataset, n, plan=fx.Plan(), **kw):  # noqa: B008
    return [fx.shard(DataLoader(dataset, **kw), ctx, plan) for ctx in world(n)]
