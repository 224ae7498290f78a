"""Packages that may be installed: importing them, and what they add by entry points."""

import functools
import importlib
import sys
from collections.abc import Callable, Collection, Hashable, Iterable
from types import ModuleType
from typing import Any, TypeVar

from fxtrain.errors import FxError, MissingPackageError

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


def optional(name: str, *, extra: str, needed_by: str) -> ModuleType:
    """Import a module that is not a core dependency; if it is missing, name the pip command.

    `needed_by` is what needs it, in the words of the user's plan or call.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != name.split(".")[0]:
            raise
        raise MissingPackageError(
            f"{needed_by} needs the package {name!r}, which is not installed. "
            f"Install it with: pip install 'fxtrain[{extra}]'",
            name=name,
        ) from error


def installed_entries(
    *,
    taken: Collection[K],
    group: str,
    kind: type[R],
    key: Callable[[R], K],
    error: type[FxError],
) -> dict[K, R]:
    """The records of a kind that entry points of installed packages load, by key.

    Imports the packages that have one in the group, such as `fxtrain.launchers`. One that does not
    load, loads something else, or has a key of another record or one that is taken, raises `error`.
    """
    table: dict[K, R] = {}
    metadata = importlib.import_module("importlib.metadata")  # slow, and few commands need it
    for entry in _entries(metadata.entry_points, group, tuple(sys.path)):
        named = f"The entry point {entry.name} = {entry.value} in {group}"
        loaded = _loaded(entry, named, error)
        if not isinstance(loaded, kind):
            raise error(
                f"{named} should load a {kind.__name__}, found {type(loaded).__name__}. Report "
                f"this to the author of its package."
            )
        if key(loaded) in table or key(loaded) in taken:
            name = key(loaded)
            shown = name.__name__ if isinstance(name, type) else name
            raise error(
                f"{named} adds a second {kind.__name__.lower()} for {shown}. Uninstall one of them."
            )
        table[key(loaded)] = loaded
    return table


def _loaded(entry: Any, named: str, error: type[FxError]) -> Any:
    try:
        return entry.load()
    except FxError:  # says what is wrong, also of an entry point that the package itself looks up
        raise
    except Exception as problem:  # whatever the package raises while it is imported
        raise error(
            f"{named} cannot be loaded: {type(problem).__name__}: {problem}. Report this to the "
            f"author of its package, or uninstall it."
        ) from problem


@functools.lru_cache(maxsize=16)  # the search reads a file of every installed package
def _entries(
    find: Callable[..., Iterable[Any]], group: str, path: tuple[str, ...]
) -> tuple[Any, ...]:
    """The entry points of a group, in the packages of the folders in `sys.path`."""
    return tuple(find(group=group))
