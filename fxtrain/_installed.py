"""Rows of a table that installed packages add, each by an entry point."""

import importlib
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from fxtrain._errors import FxError

__all__ = ["with_installed"]

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


def with_installed(
    own: Mapping[K, R],
    *,
    group: str,
    kind: type[R],
    key: Callable[[R], K],
    error: type[FxError],
) -> dict[K, R]:
    """A table with the rows of installed packages after fxtrain's own.

    Args:
        own: fxtrain's rows, by key.
        group: The group of entry points, such as `fxtrain.launchers`.
        kind: What each entry point loads to.
        key: (row) → by what it is found.
        error: The error to raise.

    Effects:
        Imports the packages that have an entry point in the group.

    Raises:
        FxError: of the kind `error`: an entry point gives something else, or two rows share a key.
    """
    table = dict(own)
    metadata = importlib.import_module("importlib.metadata")  # takes time that few commands need
    for entry in metadata.entry_points(group=group):
        row = entry.load()
        named = f"The entry point {entry.name} = {entry.value} in {group}"
        if not isinstance(row, kind):
            raise error(
                f"{named} should give a {kind.__name__}, found {type(row).__name__}. Ask the "
                f"author of its package."
            )
        if key(row) in table:
            name = key(row)
            shown = name.__name__ if isinstance(name, type) else name
            raise error(
                f"{named} brings a second {kind.__name__.lower()} for {shown}. Uninstall one of "
                f"them."
            )
        table[key(row)] = row
    return table
