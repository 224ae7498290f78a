"""Imports of packages that only some plans need."""

import importlib
from types import ModuleType

from fxtrain.errors import MissingPackageError


def optional(name: str, *, extra: str, needed_by: str) -> ModuleType:
    """Import a package that is not a core dependency.

    Args:
        name: The module to import, such as `yaml`.
        extra: The extra of fxtrain that installs it.
        needed_by: What needs it, in the words of the user's plan or call.

    Raises:
        MissingPackageError: it is not installed; the message has the pip command.
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
