"""Random generators of a rank."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fxtrain.errors import PlanError
from fxtrain.ops import xla_runtime
from fxtrain.ops.devices import device_random_state, set_device_random_state
from fxtrain.state import DistContext


def seed(value: int, ctx: DistContext, *, per_rank: bool = False) -> int:
    """Seed Python's, NumPy's (if it is imported) and torch's generators.

    Args:
        value: The seed of the run, 0 to 2**63 - 1.
        per_rank: Use a different seed on each rank, for example for dropout or augmentation; by
            default all ranks use the same, for example to initialise a model.

    Returns:
        The seed that this rank used.

    Effects:
        Changes the process's global generators and those of the context's device.

    Raises:
        PlanError: the seed is not an int in this range.

    Example:
        >>> import fxtrain as fx
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     fx.ops.seed(7, ctx)
        7
    """
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise PlanError(f"seed({value!r}): not a seed. Pass an int from 0 to 2**63 - 1.")
    mine = value + ctx.rank if per_rank else value
    random.seed(mine)
    torch.manual_seed(mine)
    if ctx.device.type == "xla":
        xla_runtime.seed(mine, ctx)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed([mine & 0xFFFFFFFF, mine >> 32])
    return mine


@contextmanager
def fork_rng(ctx: DistContext, value: int | None = None) -> Iterator[None]:
    """Run a block without affecting the random generators outside it.

    Args:
        value: Seed for the block; None starts from the current state of the generators.

    Effects:
        Saves and restores Python's, NumPy's (if imported) and torch's CPU and device
        generators.

    Example:
        >>> import fxtrain as fx, torch
        >>> with fx.detect(env={}, device="cpu") as ctx:
        ...     _ = fx.ops.seed(1, ctx)
        ...     with fx.ops.fork_rng(ctx, 5):
        ...         inside = torch.rand(1)
        ...     after = torch.rand(1)
        ...     _ = fx.ops.seed(1, ctx)
        ...     bool(torch.rand(1) == after)
        True
    """
    numpy: Any = sys.modules.get("numpy")
    kept = (random.getstate(), numpy.random.get_state() if numpy else None)
    device = device_random_state(ctx)
    with torch.random.fork_rng(devices=[]):  # the CPU generator only
        try:
            if value is not None:
                seed(value, ctx)
            yield
        finally:
            random.setstate(kept[0])
            if device is not None:
                set_device_random_state(ctx, device)
            if numpy and kept[1] is not None:
                numpy.random.set_state(kept[1])
