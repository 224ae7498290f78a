"""Timeouts that come soon, for collectives that one rank never joins.

Groups open, and models are wrapped, with the timeout of the pool, which a busy machine needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import attrs
from torch.distributed import distributed_c10d

from fxtrain import DistContext

__all__ = ["shortened", "with_timeout"]


def with_timeout(ctx: DistContext, timeout_s: float = 0.5) -> DistContext:
    """A context over the same groups whose own collectives have another timeout."""
    return attrs.evolve(ctx, comm=attrs.evolve(ctx.comm, timeout_s=timeout_s))


@contextmanager
def shortened(ctx: DistContext, timeout_s: float = 0.5) -> Iterator[None]:
    """All collectives on a context's groups time out soon, also those of models on them."""
    usual_s = ctx.comm.timeout_s

    def set_timeout(seconds: float) -> None:
        object.__setattr__(ctx.comm, "timeout_s", seconds)
        for group in (ctx.comm.group, ctx.comm.control):
            distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    set_timeout(timeout_s)
    try:
        yield
    finally:
        set_timeout(usual_s)
