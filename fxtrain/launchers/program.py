"""The command of one rank, the variables of all, and the plan among them."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxtrain.launchers.machine import Machine
from fxtrain.launchers.spec import LaunchSpec, name_values
from fxtrain.state import Plan
from fxtrain.state.files import PLAN_VARIABLE, given_values, plan_with
from fxtrain.state.mesh import resolve_mesh

_CHILD = Path(__file__).with_name("child.py")

# With these, a rank finds no such device. ROCm's torch reads CUDA's variable.
_NO_ACCELERATORS = {
    "CUDA_VISIBLE_DEVICES": "",
    "ONEAPI_DEVICE_SELECTOR": "*:cpu",
    "ASCEND_RT_VISIBLE_DEVICES": "",
}
# Launchers that take the number of ranks from the machines.
OWN_RANKS = ("deepspeed", "sagemaker", "tpu", "tpu-pod")


def rank_command(
    spec: LaunchSpec, python: str, *, errors: str = "", cores: str = ""
) -> tuple[str, ...]:
    """The command that becomes one rank, with its error recorded for the launcher.

    Output is written line by line, so that lines of several ranks keep their order. Errors go to
    the folder `errors` if the launcher does not name a file for them. Cores are those of each local
    rank between slashes, such as 0,1/2,3.
    """
    how = "module" if spec.module else "program" if spec.executable else "script"
    given = [f"--errors={errors}"] if errors else []
    given += [f"--cores={cores}"] if cores else []
    return (python, "-u", str(_CHILD), how, *given, "--", spec.target, *spec.args)


def plain_command(spec: LaunchSpec, python: str) -> tuple[str, ...]:
    """The program as started without fxtrain, for machines with other paths."""
    if spec.executable:
        return (spec.target, *spec.args)
    return (python, "-u", *(("-m",) if spec.module else ()), spec.target, *spec.args)


def shared_environment(spec: LaunchSpec, machine: Machine) -> dict[str, str]:
    """Variables of all ranks, whichever launcher starts them."""
    variables = machine.traffic
    if (threads := threads_of(spec, machine)) is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    if spec.cpu:
        variables |= _NO_ACCELERATORS
    if spec.gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)
    return variables | name_values(spec.env)


def remote_environment(spec: LaunchSpec) -> dict[str, str]:
    """Variables for ranks on machines whose cores are unknown here."""
    return shared_environment(spec, Machine(threads_chosen=True))


def threads_of(spec: LaunchSpec, machine: Machine) -> int | None:
    """Threads of each rank: as requested; a share of the cores; None if the user has chosen."""
    if spec.threads is not None:
        return spec.threads
    return None if machine.threads_chosen else max(1, len(machine.cores) // spec.ranks)


def given_plan(default: Plan | None = None, *, env: Mapping[str, str] | None = None) -> Plan:
    """The script's plan, with the fields that the launch sets.

    `fxtrain launch` takes these from its flags, from variables and from a launch file. `fx.wrap`
    and `fx.shard` use `fx.given_plan()` if the script passes no plan.

    Args:
        default: The plan of the script, which has the fields that the launch does not set;
            `fx.Plan()` by default. Tables are merged as those of a launch file are: the options
            of a strategy stay if the launch sets others of the same strategy.
        env: Variables to read instead of the process's environment.

    Raises:
        PlanError: the variable FXTRAIN_PLAN is not part of a valid plan, or its values and this
            plan do not fit together.

    Example:
        >>> import fxtrain as fx
        >>> env = {"FXTRAIN_PLAN__PRECISION": "bf16"}
        >>> plan = fx.given_plan(fx.Plan(accumulate=2), env=env)
        >>> plan.accumulate, plan.precision.compute
        (2, 'bf16')
    """
    values = given_values(os.environ if env is None else env)
    return plan_with(values, Plan() if default is None else default)


def plan_variable(values: Mapping[str, Any]) -> str:
    """NAME=VALUE of the variable that passes values of a plan to ranks."""
    return f"{PLAN_VARIABLE}={json.dumps(values, separators=(',', ':'))}"


def check_mesh(spec: LaunchSpec, plan: Plan) -> None:
    """Check that the mesh of a plan fits the ranks of a launch, where these are known."""
    known = spec.min_nodes is None and spec.launcher not in OWN_RANKS
    if plan.mesh is not None and known:
        resolve_mesh(plan.mesh, spec.world_size)
