"""Simulate one rank of a large world in one process, with torch's fake backend."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxtrain.ops import detect
from fxtrain.state import DistContext, Mesh


@contextmanager
def fake_world(n: int, *, rank: int = 0, mesh: Mesh | None = None) -> Iterator[DistContext]:
    """The context of one rank of `n`, whose collectives transfer nothing.

    Effects:
        Opens and closes torch's default process group in this process.

    Example:
        >>> from fxtrain.testing import fake_world
        >>> with fake_world(1024, rank=3) as ctx:
        ...     ctx.rank, ctx.world_size
        (3, 1024)
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=n)
    try:
        yield detect({}, device="cpu", mesh=mesh)
    finally:
        dist.destroy_process_group()
