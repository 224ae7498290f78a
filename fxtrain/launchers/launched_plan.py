"""The plan of a launch file, from the launcher to the ranks: one variable."""

import importlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxtrain.launchers.spec import LaunchSpec
    from fxtrain.state import Plan

# Launchers that take the number of ranks from the machines.
OWN_RANKS = ("deepspeed", "sagemaker", "tpu", "tpu-pod")


def given_plan(default: "Plan | None" = None, *, env: Mapping[str, str] | None = None) -> "Plan":
    """The plan that `fxtrain launch` read from a launch file, its profile and the environment.

    `fx.wrap` and `fx.shard` use it by default. Call this function to inspect it, to change a
    field of it (`attrs.evolve`), or to set another default.

    Args:
        default: The plan if no launcher passed one; `fx.Plan()` by default. Fields that the
            launch file does not set have the defaults of `fx.Plan`, not those of this plan.
        env: Variables to read instead of the process's environment.

    Raises:
        PlanError: the variable FXTRAIN_PLAN is not a valid plan.

    Example:
        >>> import fxtrain as fx
        >>> fx.given_plan(fx.Plan(accumulate=2), env={}).accumulate
        2
    """
    files = importlib.import_module("fxtrain.state.files")
    return files.plan_in(os.environ if env is None else env) or default or files.Plan()


def plan_variable(plan: "Plan") -> str:
    """NAME=VALUE of the variable that passes a plan to ranks.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.launchers import plan_variable
        >>> name, _, value = plan_variable(fx.Plan(seed=3)).partition("=")
        >>> fx.given_plan(env={name: value}).seed
        3
    """
    files = importlib.import_module("fxtrain.state.files")
    data = json.loads(files.dumps(plan))
    return f"{files.PLAN_VARIABLE}={json.dumps(data, separators=(',', ':'))}"


def check_mesh(spec: "LaunchSpec", plan: "Plan") -> None:
    """Check that the mesh of a plan fits the ranks of a launch, where these are known.

    Raises:
        MeshError: it does not.

    Example:
        >>> import fxtrain as fx
        >>> from fxtrain.launchers import LaunchSpec
        >>> from fxtrain.launchers.launched_plan import check_mesh
        >>> check_mesh(LaunchSpec(target="train.py", ranks=4), fx.Plan(mesh="tensor=2"))
    """
    known = spec.min_nodes is None and spec.launcher not in OWN_RANKS
    if plan.mesh is not None and known:
        importlib.import_module("fxtrain.state.mesh").resolve_mesh(plan.mesh, spec.world_size)
