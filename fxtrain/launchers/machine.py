"""Facts that launchers need about the machine on which the command runs."""

import importlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs

from fxtrain._addresses import GLOO, NCCL, Route, free_port
from fxtrain._secret import SECRET
from fxtrain.launchers.spec import LaunchSpec

_NODES = Path("/sys/devices/system/node")
# Patterns in `mpirun --version`; Intel's comes before the MPICH on which it is based.
_MPIS = (
    ("Open MPI", "openmpi"),
    ("OpenRTE", "openmpi"),
    ("Intel(R) MPI", "intel"),
    ("HYDRA", "mpich"),
)


@attrs.frozen(kw_only=True)
class Machine:
    """Facts that command lines depend on.

    Attributes:
        python: The interpreter for the ranks.
        cores: Numbers of the cores that this process may use.
        numa: Of those, the ones on each NUMA node; empty if unknown.
        threads_chosen: Whether the user has set OMP_NUM_THREADS.
        slurm_job: Number of the SLURM job of this process, or empty.
        root: Whether the user is root.
        mpi: Which MPI `mpirun` is: openmpi, mpich, intel; empty if there is none.
        port: A TCP port that was free a moment ago; 0 if unknown.
        folder: The current folder.
        chosen: Those of GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME and FXTRAIN_RUN_SECRET that the
            user has set.
        route: How other ranks reach this machine, if its own name does not resolve correctly.
    """

    python: str = "python"
    cores: tuple[int, ...] = attrs.field(default=(0,), converter=tuple)
    numa: tuple[tuple[int, ...], ...] = ()
    threads_chosen: bool = False
    slurm_job: str = ""
    root: bool = False
    mpi: str = ""
    port: int = 0
    folder: str = "."
    chosen: tuple[str, ...] = ()
    route: Route = attrs.field(factory=Route)

    @property
    def traffic(self) -> dict[str, str]:
        """Variables that make the ranks use the route, without those that the user has set."""
        return {name: at for name, at in self.route.env.items() if name not in self.chosen}


def look(env: Mapping[str, str], *, mpi: str, route: Route) -> Machine:
    """Inspect this machine; `mpi` is the program that starts ranks under MPI.

    Reads /sys; opens a port on loopback and closes it; runs `mpi` with --version.
    """
    cores = usable_cores()
    return Machine(
        python=sys.executable,
        cores=cores,
        numa=_numa(cores),
        threads_chosen="OMP_NUM_THREADS" in env,
        slurm_job=env.get("SLURM_JOB_ID", ""),
        root=hasattr(os, "geteuid") and os.geteuid() == 0,
        mpi=_which_mpi(mpi) if mpi else "",
        port=free_port(),
        folder=os.getcwd(),
        chosen=tuple(name for name in (GLOO, NCCL, SECRET) if name in env),
        route=route,
    )


def usable_cores() -> tuple[int, ...]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cores_of_ranks(mode: str, ranks: int, machine: Machine) -> tuple[tuple[int, ...], ...]:
    """Cores for each rank on the CPU.

    With "node", all cores of one NUMA node, ranks in blocks over the nodes; with "exclusive", a
    share of all cores that no other rank has.
    """
    nodes = machine.numa or (machine.cores,)
    if mode == "node":
        return tuple(nodes[rank * len(nodes) // ranks] for rank in range(ranks))
    cores = [core for node in nodes for core in node]
    if len(cores) < ranks:  # then neighbors share one
        return tuple((cores[rank * len(cores) // ranks],) for rank in range(ranks))
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return tuple(tuple(cores[a:b]) for a, b in itertools.pairwise(bounds))


def read_cores(text: str) -> tuple[int, ...]:
    """Numbers of cores from the kernel's short form, such as 0-2,8."""
    bounds = [[int(end) for end in part.split("-")] for part in text.split(",") if part.strip()]
    return tuple(core for bound in bounds for core in range(bound[0], bound[-1] + 1))


def _numa(cores: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    paths = sorted(_NODES.glob("node[0-9]*/cpulist"), key=lambda p: int(p.parent.name[4:]))
    nodes = [tuple(c for c in read_cores(path.read_text()) if c in cores) for path in paths]
    return tuple(node for node in nodes if node)  # some nodes have memory only


def _which_mpi(program: str) -> str:
    if shutil.which(program) is None:
        return ""
    done = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=30, check=False
    )
    return next((name for text, name in _MPIS if text in done.stdout), "")


def default_ranks(spec: LaunchSpec) -> int:
    """Ranks of a launch that names no number: one per chosen GPU, or accelerator of a machine."""
    if spec.gpus:
        return len(spec.gpus)
    if spec.launcher != "native" or spec.cpu or spec.executable:
        return 1
    return max(1, importlib.import_module("torch").accelerator.device_count())
