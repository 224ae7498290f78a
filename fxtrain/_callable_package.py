"""`fx.launch` is a function, and `fxtrain.launch` is the package that holds it.

Importing a submodule sets the parent's attribute of that name to the module, so whoever
imports `fxtrain.launch` first would turn `fx.launch(...)` into an error. A module that can be
called is both.
"""

from types import ModuleType
from typing import Any

__all__ = ["CallablePackage"]


class CallablePackage(ModuleType):
    """The type of a package that holds a function of its own name."""

    def __call__(self, *args: Any, **how: Any) -> Any:
        """That function."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **how)
