"""A streamed model, and where its parts are."""

import functools

import attrs
import torch

import fxtrain as fx
from fxtrain.backends.offload.strategy import OFFLOAD, wrap_streamed
from fxtrain.state import Unit
from fxtrain.testing import Transformer

COPIES = attrs.evolve(OFFLOAD, wrap=functools.partial(wrap_streamed, copy=True))
TOKENS = torch.arange(6)[None]


def placement(*names, **fields):
    """These units on disk, all else on the CPU."""
    disk = tuple(Unit(name=name, device="disk") for name in names)
    return fx.state.Placement(units=(Unit(name="", device="cpu"), *disk), **fields)


BLOCKS = placement("blocks.0", "blocks.1")


def empty():
    with torch.device("meta"):
        return Transformer()


def streamed(ctx, folder, placed=BLOCKS, row=None, net=None, **fields):
    config = fx.Offload(placement=placed, source=str(folder), **fields)
    return fx.wrap(net or empty(), ctx, fx.Plan(strategy=config), strategy=row)
