"""Start the processes of tests that use torch."""

import multiprocessing
import sys
from typing import Any

# Importing these takes seconds.
_LOADED = ["fxtrain.testing", "torch._dynamo"]


def starter(*more: str) -> Any:
    """Multiprocessing's context whose processes have torch loaded within a fraction of a second.

    They are forks of Python's fork server, which imports torch once. Forking is safe with loaded
    libraries only on Linux; elsewhere every process imports torch by itself.

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
