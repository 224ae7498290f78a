"""Launchers: pure functions from a spec to a command line, and the code that starts processes."""

from fxtrain.launchers.built_in.deepspeed import DeepSpeedOptions
from fxtrain.launchers.built_in.kubernetes import KubernetesOptions
from fxtrain.launchers.built_in.mpi import MpiOptions
from fxtrain.launchers.built_in.ray import RayOptions
from fxtrain.launchers.built_in.sagemaker import SageMakerOptions
from fxtrain.launchers.built_in.slurm import SlurmOptions
from fxtrain.launchers.built_in.tpu import TpuPodOptions
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
__dir__ = __all__.copy  # for completion
