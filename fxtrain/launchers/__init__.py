"""Launchers: pure functions from a spec to a command line, and the code that starts processes."""

from fxtrain.launchers.built_in.deepspeed import DeepSpeedOptions, deepspeed
from fxtrain.launchers.built_in.kubernetes import KubernetesOptions, kubernetes
from fxtrain.launchers.built_in.mpi import MpiOptions, mpi
from fxtrain.launchers.built_in.native.launcher import native
from fxtrain.launchers.built_in.ray import RayOptions, ray
from fxtrain.launchers.built_in.sagemaker.launcher import SageMakerOptions, sagemaker
from fxtrain.launchers.built_in.slurm import SlurmOptions, slurm
from fxtrain.launchers.built_in.tpu import TpuPodOptions, setup_command, tpu, tpu_pod
from fxtrain.launchers.flags import FLAGS, Flag, flag_words
from fxtrain.launchers.launcher import Launcher
from fxtrain.launchers.machine import Machine, cores_of_ranks, look, read_cores, write_cores
from fxtrain.launchers.outcome import Failure, LaunchResult, by_cause, describe, keep_tracebacks
from fxtrain.launchers.program import given_plan, plan_variable, shared_environment
from fxtrain.launchers.spec import (
    Invocation,
    LaunchSpec,
    as_json,
    options_from,
    rank_environment,
    show,
)
from fxtrain.launchers.table import LAUNCHERS, find_launcher, known_launchers, prepare, run
from fxtrain.launchers.target import check_target

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
    "MpiOptions",
    "RayOptions",
    "SageMakerOptions",
    "SlurmOptions",
    "TpuPodOptions",
    "as_json",
    "by_cause",
    "check_target",
    "cores_of_ranks",
    "deepspeed",
    "describe",
    "find_launcher",
    "flag_words",
    "given_plan",
    "keep_tracebacks",
    "known_launchers",
    "kubernetes",
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
    "tpu",
    "tpu_pod",
    "write_cores",
]
