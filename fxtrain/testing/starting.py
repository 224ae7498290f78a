"""How tests start processes that work with torch."""

import multiprocessing
import sys
from typing import Any

__all__ = ["starter"]

# Loading these takes a process seconds.
_LOADED = ["fxtrain.testing", "torch._dynamo"]


def starter(*more: str) -> Any:
    """Multiprocessing's context whose processes have torch loaded within a fraction of a second.

    They are forks of Python's fork server, which loads torch once. Only Linux forks safely when
    libraries are loaded; elsewhere every process loads torch by itself.

    Args:
        more: Modules that the fork server loads as well, if it has not started yet.

    Effects:
        Tells the fork server what to load when it starts.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([*_LOADED, *more])
    return forks
