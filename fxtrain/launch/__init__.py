"""Launching: specs to arguments and environment (pure), and what starts the processes.

Example:
    >>> import fxtrain as fx
    >>> fx.launch(divmod, (7, 2), ranks=1)  # the package is also its main function
    [(3, 1)]
"""

import sys
from typing import TYPE_CHECKING

from fxtrain.launch._callable import CallableModule
from fxtrain.launch._deepspeed_launcher import DeepSpeedOptions, deepspeed
from fxtrain.launch._ending import Ending, Failure, by_cause, describe
from fxtrain.launch._fields import options_from
from fxtrain.launch._flags import FLAGS, Flag, flag_words
from fxtrain.launch._given import given_plan, plan_variable
from fxtrain.launch._invocation import Invocation, as_json, show
from fxtrain.launch._kubernetes import KubernetesOptions, kubernetes
from fxtrain.launch._launchers import LAUNCHERS, Launcher, find_launcher, prepare, run
from fxtrain.launch._loading import load_torch
from fxtrain.launch._machine import Machine, cores_of_ranks, look, read_cores, write_cores
from fxtrain.launch._memory import MemoryKills, count_kills, tell_kills
from fxtrain.launch._mpi import MpiOptions, mpi
from fxtrain.launch._native import native
from fxtrain.launch._program import shared_environment
from fxtrain.launch._ray import RayOptions, ray
from fxtrain.launch._reports import keep_tracebacks
from fxtrain.launch._sagemaker import SageMakerOptions, sagemaker
from fxtrain.launch._slurm import SlurmOptions, slurm
from fxtrain.launch._spec import LaunchSpec, rank_environment
from fxtrain.launch._target import check_target
from fxtrain.launch._tpu import TpuPodOptions, pod_command, tpu, tpu_pod

if TYPE_CHECKING:
    from fxtrain.launch._function import launch as launch

__all__ = [
    "DeepSpeedOptions",
    "Ending",
    "FLAGS",
    "Failure",
    "Flag",
    "Invocation",
    "KubernetesOptions",
    "LAUNCHERS",
    "LaunchSpec",
    "Launcher",
    "Machine",
    "MemoryKills",
    "MpiOptions",
    "RayOptions",
    "SageMakerOptions",
    "SlurmOptions",
    "TpuPodOptions",
    "as_json",
    "by_cause",
    "check_target",
    "cores_of_ranks",
    "count_kills",
    "deepspeed",
    "describe",
    "find_launcher",
    "flag_words",
    "given_plan",
    "keep_tracebacks",
    "kubernetes",
    "launch",
    "load_torch",
    "look",
    "mpi",
    "native",
    "options_from",
    "plan_variable",
    "pod_command",
    "prepare",
    "rank_environment",
    "ray",
    "read_cores",
    "run",
    "sagemaker",
    "shared_environment",
    "show",
    "slurm",
    "tell_kills",
    "tpu",
    "tpu_pod",
    "write_cores",
]

sys.modules[__name__].__class__ = CallableModule
