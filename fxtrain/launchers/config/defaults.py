"""Properties of this machine, for suitable defaults."""

import os
import shutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import attrs

from fxtrain.launchers.config.launch_file import Section
from fxtrain.state.registry import installed_configs


@attrs.frozen(kw_only=True)
class Machine:
    """Properties of a machine that matter for a launch file.

    Attributes:
        cores: Cores available to a process.
        kind: Device type of its accelerators, as torch names it; cpu without any.
        count: Number of accelerators.
        bf16: Whether they compute in bf16.
        slurm: Whether a SLURM cluster accepts jobs here.
        tpu: Name of the TPU in the environment; empty without one.
        strategies: Strategy configs of installed packages.
    """

    cores: int = 1
    kind: str = "cpu"
    count: int = 0
    bf16: bool = False
    slurm: bool = False
    tpu: str = ""
    strategies: tuple[type, ...] = ()

    @property
    def summary(self) -> str:
        """The machine in a few words."""
        some = f"{self.count} {self.kind} devices" if self.count else "no accelerator"
        return f"a machine with {some} and {self.cores} cores"


def detect_machine(env: Mapping[str, str] | None = None) -> Machine:
    """Inspect this machine.

    Effects:
        Imports torch and asks it for devices. Loads the strategies of installed packages.

    Example:
        >>> from fxtrain.launchers.config import detect_machine
        >>> detect_machine().cores >= 1
        True
    """
    env = os.environ if env is None else env
    torch = import_module("torch")
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = there.type if there else "cpu"
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        cores=len(affinity(0)) if affinity else os.cpu_count() or 1,
        kind=kind,
        count=torch.accelerator.device_count() if there else 0,
        bf16=_bf16(torch, kind),
        slurm=bool(shutil.which("sbatch", path=env.get("PATH"))),
        tpu=env.get("TPU_NAME", ""),
        strategies=installed_configs(),
    )


def suggested(machine: Machine) -> Section:
    """A setup for this machine alone: one rank per accelerator, bf16 if it is fast.

    Example:
        >>> from fxtrain.launchers.config import Machine, suggested
        >>> suggested(Machine(kind="cuda", count=8, bf16=True))
        Section(launch={'ranks': 8}, plan={'precision': 'bf16'})
    """
    precision = {"precision": "bf16"} if machine.bf16 else {}
    return Section(launch={"ranks": max(1, machine.count)}, plan=precision)


def _bf16(torch: Any, kind: str) -> bool:
    module = getattr(torch, kind, None)
    fast = getattr(module, "is_bf16_supported", None)
    return bool(kind != "cpu" and fast and fast())
