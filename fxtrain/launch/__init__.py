"""Starting ranks: scripts over torch's elastic launcher, functions from a notebook."""

import sys
import types
from typing import Any

from fxtrain.launch._elastic import run_script
from fxtrain.launch._function import launch
from fxtrain.launch._spec import LaunchSpec, command, rank_variables, shared_variables

__all__ = [
    "LaunchSpec",
    "command",
    "launch",
    "rank_variables",
    "run_script",
    "shared_variables",
]


class _Callable(types.ModuleType):
    """`fx.launch` names both this package and its main function, so the package is callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> list[Any]:
        return launch(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
