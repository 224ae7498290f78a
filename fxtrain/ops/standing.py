"""What tells where a rank stands: what its models count, and where it trains."""

import weakref
from contextvars import ContextVar

import attrs

from fxtrain.state import AccumulationWindow, Wrapped

FOLDER = "stacks"  # in the folder of a run, or of a launch's output
STACKS = "FXTRAIN_STACKS"  # the folder, set by the launcher or by the user


# The models that `fx.wrap` returns, for a dry run, whose program has contexts of its own.
wrapped_models: ContextVar[list[weakref.ref[Wrapped]] | None] = ContextVar(
    "wrapped_models", default=None
)


class Windows(weakref.WeakSet[AccumulationWindow]):
    """What counts the updates of each model that was wrapped for a communicator."""


@attrs.define
class RunFolder:
    """Where a context trains: the folder of its open run, or else the first that it saved into.

    Rank 0 leaves its report there, since that of the launcher may be temporary.
    """

    path: str = ""
