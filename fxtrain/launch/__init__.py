"""Launching: specs to arguments and environment (pure), and what starts the processes.

Example:
    >>> import fxtrain as fx
    >>> fx.launch(divmod, (7, 2), ranks=1)  # the package is also its main function
    [(3, 1)]
"""

import sys

from fxtrain.launch._callable import CallableModule
from fxtrain.launch._elastic import run
from fxtrain.launch._ending import Ending, Failure, by_cause, describe
from fxtrain.launch._function import launch
from fxtrain.launch._spec import (
    LaunchSpec,
    child_arguments,
    child_environment,
    elastic_options,
    rank_environment,
)
from fxtrain.launch._target import check_target

__all__ = [
    "Ending",
    "Failure",
    "LaunchSpec",
    "by_cause",
    "check_target",
    "child_arguments",
    "child_environment",
    "describe",
    "elastic_options",
    "launch",
    "rank_environment",
    "run",
]

sys.modules[__name__].__class__ = CallableModule
