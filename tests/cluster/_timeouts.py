"""Timeouts that come soon, for collectives that one rank never joins.

Groups open, and models are wrapped, with the timeout of the pool, which a busy machine needs.
"""

from __future__ import annotations

from datetime import timedelta

import attrs
from torch.distributed import distributed_c10d

from fxtrain import DistContext

__all__ = ["with_timeout", "shorten"]


def with_timeout(ctx: DistContext, timeout_s: float = 0.5) -> DistContext:
    """A context over the same groups whose own collectives have another timeout."""
    return attrs.evolve(ctx, comm=attrs.evolve(ctx.comm, timeout_s=timeout_s))


def shorten(ctx: DistContext, timeout_s: float = 0.5) -> None:
    """Let all collectives on a context's group time out soon, also those of models on it.

    The pool must start again afterwards, as it does after a call that timed out.
    """
    object.__setattr__(ctx.comm, "timeout_s", timeout_s)
    distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), ctx.comm.group)
