"""Launchers: pure functions from a spec to a command line, and the code that starts processes."""

from typing import TYPE_CHECKING

from fxtrain import _extensions
from fxtrain.launchers.launcher import Launcher
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.outcome import Failure, LaunchResult, by_cause, describe
from fxtrain.launchers.program import given_plan
from fxtrain.launchers.spec import Invocation, LaunchSpec, show
from fxtrain.launchers.table import (
    LAUNCHERS,
    check_target,
    find_launcher,
    known_launchers,
    prepare,
    run,
)

if TYPE_CHECKING:
    from fxtrain._extensions import (
        DeepSpeedOptions,
        KubernetesOptions,
        MpiOptions,
        RayOptions,
        SageMakerOptions,
        SlurmOptions,
        TpuPodOptions,
    )

__all__ = [
    "DeepSpeedOptions",
    "Failure",
    "Invocation",
    "KubernetesOptions",
    "LAUNCHERS",
    "LaunchResult",
    "LaunchSpec",
    "Launcher",
    "Machine",
    "MpiOptions",
    "RayOptions",
    "SageMakerOptions",
    "SlurmOptions",
    "TpuPodOptions",
    "by_cause",
    "check_target",
    "describe",
    "find_launcher",
    "given_plan",
    "known_launchers",
    "prepare",
    "run",
    "show",
]
__getattr__ = _extensions.offers(__name__, __all__)
__dir__ = __all__.copy  # for completion
