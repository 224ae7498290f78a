"""The function `fx.launch`, imported on first use."""

import importlib
from collections.abc import Callable
from typing import Any

from fxtrain._packages import CallablePackage


class CallableModule(CallablePackage):
    """The type of the package `fxtrain.launch`.

    The function is imported on first use: the command line never uses it, and its script should
    not wait for what it imports.
    """

    @property
    def launch(self) -> Callable[..., list[Any]]:
        """The function `launch`."""
        return importlib.import_module("fxtrain.launch.function.launching").launch
