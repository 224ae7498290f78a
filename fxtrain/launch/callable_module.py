"""The function `fx.launch`, loaded when it is asked for."""

import importlib
from collections.abc import Callable
from typing import Any

from fxtrain._callable_package import CallablePackage

__all__ = ["CallableModule"]


class CallableModule(CallablePackage):
    """The type of the package `fxtrain.launch`.

    The function is loaded when it is asked for: the command line never is the one that asks,
    and its script waits for what it loads.
    """

    @property
    def launch(self) -> Callable[..., list[Any]]:
        """The function `launch`."""
        return importlib.import_module("fxtrain.launch.function.launching").launch
