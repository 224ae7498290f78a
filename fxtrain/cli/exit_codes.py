"""Exit codes, in the one place that says what they mean."""

import enum

__all__ = ["Exit"]


class Exit(enum.IntEnum):
    """What the exit code of `fxtrain` says.

    `fxtrain launch` ends with the code of the rank that failed first, whatever it is, and
    with 128 + n when signal n ended that rank or the launcher.

    Attributes:
        WELL: The command did what it was asked.
        FOUND: It ran to its end, and what it looked at is not in order: a rank failed, a
            test did not pass, a file holds mistakes.
        WRONG: Arguments, settings or files make no sense or cannot be read or written, or a
            package is missing.
        INTERRUPTED: Ctrl-C, or the answer to a question was refused.
    """

    WELL = 0
    FOUND = 1
    WRONG = 2
    INTERRUPTED = 130
