"""Names in a plan that a model does not have."""

import difflib
import fnmatch
from collections.abc import Iterable

from torch import nn


def unknown_classes(module: nn.Module, names: Iterable[str], *, field: str) -> list[str]:
    """A problem for each class name that matches no submodule."""
    known = sorted({type(part).__name__ for part in module.modules()})
    return [
        f"{field} names the class {name!r}, but no submodule of {type(module).__name__} has it. "
        f"Did you mean {', '.join(difflib.get_close_matches(name, known, n=3) or known[:10])}?"
        for name in names
        if name not in known
    ]


def unknown_patterns(
    patterns: Iterable[str], names: list[str], *, field: str, what: str = "parameter"
) -> list[str]:
    """A problem for each pattern that matches no name."""
    return [
        f"{field}: no {what} matches {pattern!r}. "
        f"Did you mean {', '.join(difflib.get_close_matches(pattern, names, n=3) or names[:5])}?"
        for pattern in patterns
        if not fnmatch.filter(names, pattern)
    ]
