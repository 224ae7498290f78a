"""`fx.launch` is a function, and `fxtrain.launch` is the package that holds it.

Importing a submodule sets the parent's attribute of that name to the module, so whoever
imports `fxtrain.launch` first would turn `fx.launch(...)` into an error. A module that can be
called is both.
"""

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["CallableModule"]


class CallableModule(ModuleType):
    """The type of the package `fxtrain.launch`.

    The function is loaded when it is asked for: the command line never is the one that asks,
    and its script waits for what it loads.
    """

    @property
    def launch(self) -> Callable[..., list[Any]]:
        """The function `launch`."""
        return importlib.import_module("fxtrain.launch.function.launching").launch

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        **how: Any,
    ) -> list[Any]:
        """The function `launch`."""
        return self.launch(fn, args, **how)
