"""`fx.launch` is a function, and `fxtrain.launch` is the package that holds it.

Importing a submodule sets the parent's attribute of that name to the module, so whoever
imports `fxtrain.launch` first would turn `fx.launch(...)` into an error. A module that can be
called is both.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from fxtrain.launch._function import launch

__all__ = ["CallableModule"]


class CallableModule(ModuleType):
    """The type of the package `fxtrain.launch`."""

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        **how: Any,
    ) -> list[Any]:
        """The function `launch`."""
        return launch(fn, args, **how)
