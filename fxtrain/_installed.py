"""Records that installed packages add to a table, by entry points."""

import importlib
from collections.abc import Callable, Collection, Hashable
from typing import TypeVar

from fxtrain._errors import FxError

__all__ = ["installed_rows"]

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


def installed_rows(
    *,
    taken: Collection[K],
    group: str,
    kind: type[R],
    key: Callable[[R], K],
    error: type[FxError],
) -> dict[K, R]:
    """The records that entry points of installed packages load, by key.

    Args:
        taken: Keys of fxtrain's own records.
        group: The group of entry points, such as `fxtrain.launchers`.
        kind: The type that each entry point must load.
        key: (record) → its key.
        error: The error to raise.

    Effects:
        Imports the packages that have an entry point in the group.

    Raises:
        FxError: of type `error`: an entry point loads something else, or two records share a key.
    """
    table: dict[K, R] = {}
    metadata = importlib.import_module("importlib.metadata")  # slow, and few commands need it
    for entry in metadata.entry_points(group=group):
        row = entry.load()
        named = f"The entry point {entry.name} = {entry.value} in {group}"
        if not isinstance(row, kind):
            raise error(
                f"{named} should load a {kind.__name__}, found {type(row).__name__}. Report this "
                f"to the author of its package."
            )
        if key(row) in table or key(row) in taken:
            name = key(row)
            shown = name.__name__ if isinstance(name, type) else name
            raise error(
                f"{named} adds a second {kind.__name__.lower()} for {shown}. Uninstall one of them."
            )
        table[key(row)] = row
    return table
