"""Errors that are found when the script has already ended."""

import atexit
import os
import sys
from collections.abc import Callable


def exit_with(error: BaseException, caller: Callable[[], object]) -> None:
    """End the program as an uncaught exception does.

    Once the script has ended, Python has no other way to change the exit code: it prints and
    discards what functions of `atexit` raise. The remaining functions therefore run from here,
    which closes process groups and trackers, and then the process exits.

    Args:
        error: What failed.
        caller: The function of `atexit` that calls this one.
    """
    # If the script itself failed, a launcher keeps the first error that the hook received.
    failed = getattr(sys, "last_value", None) is not None
    try:
        (sys.__excepthook__ if failed else sys.excepthook)(type(error), error, error.__traceback__)
        atexit.unregister(caller)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(1)
