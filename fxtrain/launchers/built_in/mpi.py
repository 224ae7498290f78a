"""MPI's mpirun or mpiexec: Open MPI, MPICH and Intel MPI."""

from typing import Literal

import attrs

from fxtrain._secret import SECRET
from fxtrain.errors import LaunchError
from fxtrain.launchers.launcher import ERRORS, RENDEZVOUS_FIELDS, Launcher
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.program import rank_command, shared_environment, threads_of
from fxtrain.launchers.spec import Invocation, LaunchSpec, launch_record, number_from

# Under the names of Open MPI and MPICH; "exclusive" is as many cores as a rank has threads.
_BINDINGS = {
    "none": "none",
    "node": "numa",
    "socket": "socket",
    "exclusive": "core",
    "core-complex": "l3cache",
}
_INTEL_DOMAINS = _BINDINGS | {"exclusive": "omp", "core-complex": "cache3"}


@launch_record
class MpiOptions:
    """How ranks start under MPI.

    Attributes:
        kind: Which MPI it is; by default as `mpirun --version` says.
        program: The program that starts ranks.
        hostfile: File with the names of the machines.
        ccl_workers: Communication threads of oneCCL in each rank.
        ccl_transport: Transport of oneCCL.
        extra: Further arguments for the program, one each.
    """

    kind: Literal["openmpi", "mpich", "intel"] | None = None
    program: str = "mpirun"
    hostfile: str = ""
    ccl_workers: int | None = attrs.field(default=None, validator=number_from(1))
    ccl_transport: Literal["mpi", "ofi"] | None = None
    extra: tuple[str, ...] = ()


def mpi(spec: LaunchSpec, machine: Machine) -> Invocation:
    """The command line of mpirun, on this machine or on those of a hostfile."""
    options = spec.options
    kind = options.kind or machine.mpi
    if not kind:
        raise LaunchError(
            f"{options.program} is not installed, or its version is unknown. Install one, or set "
            f"the option kind to openmpi, mpich or intel."
        )
    if spec.nodes > 1 and not (options.hostfile and spec.main_address):
        raise LaunchError(
            f"{spec.nodes} nodes under MPI need the option hostfile with their names, and "
            f"main_address with the name of the first, to which the ranks connect."
        )
    env = shared_environment(spec, machine) | {
        "MASTER_ADDR": spec.main_address or "127.0.0.1",
        "MASTER_PORT": str(spec.port or machine.port),
        **_ccl(options, kind),
    }
    words = _open_mpi(spec, machine, env) if kind == "openmpi" else _hydra(spec, machine, kind)
    folder = ERRORS if spec.nodes == 1 or spec.log_dir else ""
    ranks = rank_command(spec, machine.python, errors=folder)
    return Invocation(argv=[options.program, *words, *options.extra, *ranks], env=env)


def _ccl(options: MpiOptions, kind: str) -> dict[str, str]:
    variables: dict[str, str] = {}
    if options.ccl_workers is not None:
        variables["CCL_WORKER_COUNT"] = str(options.ccl_workers)
    if options.ccl_transport is not None:
        variables["CCL_ATL_TRANSPORT"] = options.ccl_transport
    if variables and kind != "openmpi":
        variables["CCL_PROCESS_LAUNCHER"] = "hydra"
    return variables


def _open_mpi(spec: LaunchSpec, machine: Machine, env: dict[str, str]) -> list[str]:
    """Pass variables by name, since Open MPI 4 splits NAME=VALUE at a semicolon."""
    options = spec.options
    hosts = ["--hostfile", options.hostfile] if options.hostfile else ["--oversubscribe"]
    secret = [SECRET] if SECRET in machine.chosen else []
    share = f":PE={threads_of(spec, machine) or 1}" if spec.bind == "exclusive" else ""
    return [
        *("-np", str(spec.world_size)),
        *hosts,
        *("--map-by", f"ppr:{spec.ranks}:node{share}"),
        *("--bind-to", _BINDINGS[spec.bind]),
        "--quiet",  # hides its message on a failed rank; ours has the traceback
        *(["--allow-run-as-root"] if machine.root else []),
        *(word for name in (*env, *secret) for word in ("-x", name)),
    ]


def _hydra(spec: LaunchSpec, machine: Machine, kind: str) -> list[str]:
    """MPICH and Intel MPI, which pass all variables to the ranks."""
    options = spec.options
    if kind == "intel":
        domain = _INTEL_DOMAINS[spec.bind]
        pin = ["-genv", "I_MPI_PIN_DOMAIN", domain] if spec.bind != "none" else []
    else:
        share = f":{threads_of(spec, machine) or 1}" if spec.bind == "exclusive" else ""
        pin = ["-bind-to", f"{_BINDINGS[spec.bind]}{share}"]
    return [
        *("-np", str(spec.world_size)),
        *("-ppn", str(spec.ranks)),
        *(["-f", options.hostfile] if options.hostfile else []),
        *pin,
    ]


MPI = Launcher(
    name="mpi",
    help="mpirun of Open MPI, MPICH or Intel MPI",
    invocation=mpi,
    options=MpiOptions,
    uses=[*RENDEZVOUS_FIELDS, "bind", "log_dir"],
)
