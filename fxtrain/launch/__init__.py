"""Launchers: pure functions from a spec to a command line, and the code that starts processes.

Example:
    >>> import fxtrain as fx
    >>> fx.launch(divmod, (7, 2), ranks=1)  # the package is also its main function
    [(3, 1)]
"""

import sys
from typing import TYPE_CHECKING

from fxtrain.launch.callable_module import CallableModule
from fxtrain.launch.fields import options_from
from fxtrain.launch.flags import FLAGS, Flag, flag_words
from fxtrain.launch.invocation import Invocation, as_json, show
from fxtrain.launch.launched_plan import given_plan, plan_variable
from fxtrain.launch.launcher import Launcher
from fxtrain.launch.launchers.deepspeed.launcher import DeepSpeedOptions, deepspeed
from fxtrain.launch.launchers.kubernetes import KubernetesOptions, kubernetes
from fxtrain.launch.launchers.mpi import MpiOptions, mpi
from fxtrain.launch.launchers.native.launcher import native
from fxtrain.launch.launchers.native.oom import MemoryKills, count_kills, tell_kills
from fxtrain.launch.launchers.native.preload import load_torch
from fxtrain.launch.launchers.ray.launcher import RayOptions, ray
from fxtrain.launch.launchers.sagemaker.launcher import SageMakerOptions, sagemaker
from fxtrain.launch.launchers.slurm import SlurmOptions, slurm
from fxtrain.launch.launchers.tpu import TpuPodOptions, setup_command, tpu, tpu_pod
from fxtrain.launch.machine import Machine, cores_of_ranks, look, read_cores, write_cores
from fxtrain.launch.outcome import Failure, LaunchResult, by_cause, describe
from fxtrain.launch.program import shared_environment
from fxtrain.launch.rank_reports import keep_tracebacks
from fxtrain.launch.spec import LaunchSpec, rank_environment
from fxtrain.launch.table import LAUNCHERS, find_launcher, known_launchers, prepare, run
from fxtrain.launch.target import check_target

if TYPE_CHECKING:
    from fxtrain.launch.function.launching import launch as launch

__all__ = [
    "DeepSpeedOptions",
    "FLAGS",
    "Failure",
    "Flag",
    "Invocation",
    "KubernetesOptions",
    "LAUNCHERS",
    "LaunchResult",
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
    "known_launchers",
    "kubernetes",
    "launch",
    "load_torch",
    "look",
    "mpi",
    "native",
    "options_from",
    "plan_variable",
    "prepare",
    "rank_environment",
    "ray",
    "read_cores",
    "run",
    "sagemaker",
    "setup_command",
    "shared_environment",
    "show",
    "slurm",
    "tell_kills",
    "tpu",
    "tpu_pod",
    "write_cores",
]

sys.modules[__name__].__class__ = CallableModule
