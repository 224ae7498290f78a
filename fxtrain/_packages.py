"""Packages that list their public names, and answer those of other libraries."""

from types import ModuleType
from typing import TYPE_CHECKING, NoReturn

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
