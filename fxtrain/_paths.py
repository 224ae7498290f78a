"""What can be the name of a file or folder, asked before the system is."""

import os
from typing import Any

__all__ = ["path_problem"]


def path_problem(path: Any) -> str:
    """Why something names no file or folder; empty where it may.

    Example:
        >>> from fxtrain._paths import path_problem
        >>> path_problem("runs/a"), path_problem(3)
        ('', 'a path is a string or a pathlib.Path, found int')
    """
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str):
        return f"a path is a string or a pathlib.Path, found {type(path).__name__}"
    if not text:
        return 'a path was expected, found an empty string; the current folder is "."'
    if "\0" in text:
        return f"{text[:80]!r} holds a null character, which no path can"
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return f"{text[:80]!a} holds characters that no path of this system can"
    return ""
