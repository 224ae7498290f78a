"""Exit codes and their meanings."""

import enum


class Exit(enum.IntEnum):
    """The exit code of `fxtrain`.

    `fxtrain launch` exits with the code of the rank that failed first, and with 128 + n when
    signal n ended that rank or the launcher.

    Attributes:
        WELL: The command succeeded.
        FOUND: The command completed, and what it checked has problems: a rank failed, a test did
            not pass, a file contains errors.
        WRONG: Arguments, settings or files are invalid or cannot be read or written, or a package
            is missing.
        INTERRUPTED: Ctrl-C, or the user aborted a question.
    """

    WELL = 0
    FOUND = 1
    WRONG = 2
    INTERRUPTED = 130
