"""Makes `fx.launch` a function, although `fxtrain.launch` is also a package.

Importing a submodule sets the parent's attribute of that name to the module, so an
`import fxtrain.launch` would turn `fx.launch(...)` into an error. A module that can be called
is both.
"""

from types import ModuleType
from typing import Any

__all__ = ["CallablePackage"]


class CallablePackage(ModuleType):
    """The type of a package that contains a function of its own name."""

    def __call__(self, *args: Any, **how: Any) -> Any:
        """Return that function's result."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **how)
