"""A command of the command line, as a record: a larger line is a longer table."""

import argparse
from collections.abc import Callable

import attrs

__all__ = ["Command"]


@attrs.frozen(kw_only=True)
class Command:
    """One word after `fxtrain`.

    Attributes:
        name: The word.
        help: What it does, in one line.
        arguments: Adds its arguments to a parser.
        run: Carries parsed arguments out and returns the exit code. Packages that take time
            to load are imported when it needs them, not before.
    """

    name: str
    help: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
