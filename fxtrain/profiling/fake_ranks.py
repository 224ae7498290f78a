"""A simulated world: torch's fake process group, which transfers nothing."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import distributed as dist

from fxtrain._errors import ContextError, PlanError
from fxtrain.state import Mesh, read_topology, resolve_mesh

NODE_RANKS = 8


def place(world: int, rank: int, mesh: Mesh | None) -> dict[str, str]:
    """The environment variables of one rank, as a launcher sets them.

    Raises:
        PlanError: the rank does not exist.
        ContextError: the mesh does not fit the world size.
    """
    if type(world) is not int or world < 1:
        raise PlanError(f"A dry run with world={world!r}: pass a number of ranks, 1 or more.")
    if type(rank) is not int or not 0 <= rank < world:
        raise PlanError(
            f"A dry run as rank={rank!r} of {world}: choose a rank from 0 to {world - 1}."
        )
    resolve_mesh(mesh or Mesh(), world)
    # The largest node size that divides the world size.
    local = next(size for size in range(min(world, NODE_RANKS), 0, -1) if world % size == 0)
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }
    return {name: str(value) for name, value in variables.items()}


@contextmanager
def fake_group(variables: Mapping[str, str]) -> Iterator[None]:
    """Open the fake process group that these variables describe.

    Effects:
        Opens and closes torch's default process group in this process.

    Raises:
        ContextError: a process group is already open.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ContextError(
            "dry_run: this process already has a process group, and a dry run opens its own. "
            "Close the context first, or use `fxtrain plan`, which starts a new process."
        )
    at = read_topology(variables)
    dist.init_process_group("fake", store=FakeStore(), rank=at.rank, world_size=at.world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
