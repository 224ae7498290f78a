"""Packages that list and answer names, and packages that are functions too.

Importing a submodule sets the parent's attribute of that name to the module, so an
`import fxtrain.launch` would turn `fx.launch(...)` into an error. A module that can be called
is both.
"""

from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from fxtrain._other_names import call_hint, closest


class Package(ModuleType):
    """The type of a package that completes to its public names, and answers other libraries'."""

    __all__: list[str]

    def __dir__(self) -> list[str]:
        """The public names, without the modules that define them."""
        return [*self.__all__]

    if not TYPE_CHECKING:  # for a type checker, every name would exist

        def __getattr__(self, name: str) -> NoReturn:
            other = "" if name.startswith("_") else call_hint(name) or closest(name, self.__all__)
            text = f"module {self.__name__!r} has no attribute {name!r}"
            raise AttributeError(f"{text}.{other}" if other else text)


class CallablePackage(Package):
    """The type of a package that contains a function of its own name."""

    def __call__(self, *args: Any, **how: Any) -> Any:
        """Return that function's result."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **how)
