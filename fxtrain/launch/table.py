"""The launchers, by name: a row says how a spec becomes a command line and how that is run."""

import os
from collections.abc import Callable, Mapping
from types import MappingProxyType

import attrs

from fxtrain._errors import LaunchError
from fxtrain.launch.fields import nearest, options_from
from fxtrain.launch.invocation import Invocation
from fxtrain.launch.launchers.deepspeed.launcher import DeepSpeedOptions, deepspeed
from fxtrain.launch.launchers.kubernetes import KubernetesOptions, kubernetes
from fxtrain.launch.launchers.mpi import MpiOptions, mpi
from fxtrain.launch.launchers.native.addresses import Route, find_route, loopback_route
from fxtrain.launch.launchers.native.elastic import run_elastic
from fxtrain.launch.launchers.native.launcher import native
from fxtrain.launch.launchers.native.network import is_local
from fxtrain.launch.launchers.ray.launcher import RayOptions, ray
from fxtrain.launch.launchers.sagemaker.launcher import SageMakerOptions, sagemaker
from fxtrain.launch.launchers.slurm import SlurmOptions, slurm
from fxtrain.launch.launchers.tpu import TpuPodOptions, tpu, tpu_pod
from fxtrain.launch.machine import Machine, look
from fxtrain.launch.outcome import LaunchResult
from fxtrain.launch.process import run_program
from fxtrain.launch.spec import LaunchSpec
from fxtrain.launch.target import check_target

__all__ = ["LAUNCHERS", "Launcher", "find_launcher", "prepare", "run"]


@attrs.frozen(kw_only=True)
class Launcher:
    """Who starts ranks, as functions of a spec.

    Attributes:
        name: By which it is chosen.
        help: What it does, in one line.
        invocation: From a spec and a machine to what is started; pure.
        run: Starts an invocation and waits for its end.
        options: The record of options that only this launcher has, or None.
        uses: Fields of `LaunchSpec` beyond the common ones that it honours; another field
            that is set is an error.
        here: The program is on this machine, so that it can be looked for.
        needs: Facts of the machine that cost something to find out: mpi, port, hosts, and the
            route to the main address of several nodes.
    """

    name: str
    help: str
    invocation: Callable[[LaunchSpec, Machine], Invocation]
    run: Callable[[LaunchSpec, Invocation], LaunchResult] = run_program
    options: type | None = None
    uses: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)
    here: bool = True
    needs: frozenset[str] = attrs.field(default=frozenset(), converter=frozenset)


# What every launcher can do.
_COMMON = frozenset(
    ("target", "args", "ranks", "module", "executable", "launcher", "options", "nodes", "env",
     "cpu", "gpus", "threads")
)  # fmt: skip
_RENDEZVOUS_FIELDS = ("main_address", "main_port")
_ON_EACH_NODE = (
    "connect_timeout_s", "monitor_interval_s", "shutdown_s", "role", "log_dir", "redirect", "tee",
    "show_ranks", "bind", "restarts",
)  # fmt: skip

_BUILT_IN = (
    Launcher(
        name="native",
        help="torch's elastic launcher, on this machine and on others that run the same",
        invocation=native,
        run=run_elastic,
        uses=[field.name for field in attrs.fields(LaunchSpec)],
        needs=["route"],
    ),
    Launcher(
        name="mpi",
        help="mpirun of Open MPI, MPICH or Intel MPI",
        invocation=mpi,
        options=MpiOptions,
        uses=[*_RENDEZVOUS_FIELDS, "bind", "log_dir"],
        needs=["mpi", "port"],
    ),
    Launcher(
        name="slurm",
        help="srun inside a job of SLURM, or else a batch file for sbatch",
        invocation=slurm,
        options=SlurmOptions,
        uses=[*_RENDEZVOUS_FIELDS, "bind", "log_dir"],
    ),
    Launcher(
        name="deepspeed",
        help="DeepSpeed's launcher, on this machine or on those of its hostfile",
        invocation=deepspeed,
        options=DeepSpeedOptions,
        uses=[*_RENDEZVOUS_FIELDS, "log_dir"],
        needs=["port", "hosts"],
    ),
    Launcher(name="tpu", help="one process for the TPU of this host", invocation=tpu),
    Launcher(
        name="tpu-pod",
        help="the hosts of a TPU pod, through gcloud",
        invocation=tpu_pod,
        options=TpuPodOptions,
        here=False,
    ),
    Launcher(
        name="ray",
        help="the nodes of a Ray cluster",
        invocation=ray,
        options=RayOptions,
        uses=[*_ON_EACH_NODE, "main_port"],
    ),
    Launcher(
        name="kubernetes",
        help="pods of Kubernetes, as a JobSet or a PyTorchJob",
        invocation=kubernetes,
        options=KubernetesOptions,
        uses=_ON_EACH_NODE,
        here=False,
    ),
    Launcher(
        name="sagemaker",
        help="a training job of Amazon SageMaker",
        invocation=sagemaker,
        options=SageMakerOptions,
        here=False,
    ),
)

LAUNCHERS: Mapping[str, Launcher] = MappingProxyType({row.name: row for row in _BUILT_IN})


def find_launcher(spec: LaunchSpec) -> Launcher:
    """The row of a spec's launcher.

    Raises:
        LaunchError: there is none of that name, or the spec asks for what it cannot do.
    """
    row = LAUNCHERS.get(spec.launcher)
    if row is None:
        raise LaunchError(
            f"There is no launcher {spec.launcher!r}.{nearest(spec.launcher, tuple(LAUNCHERS))} "
            f"There are: {', '.join(LAUNCHERS)}."
        )
    idle = [
        f"{field.name}={getattr(spec, field.name)!r}"
        for field in attrs.fields(LaunchSpec)
        if field.name not in _COMMON | row.uses and getattr(spec, field.name) != field.default
    ]
    if idle:
        raise LaunchError(
            f"The launcher {row.name} has no use for {', '.join(idle)}. Leave that out, or "
            f"choose another launcher."
        )
    return row


def with_options(spec: LaunchSpec) -> LaunchSpec:
    """The spec with its launcher's options as a record: read from a mapping, or the defaults.

    Raises:
        LaunchError: the options are another launcher's, or do not fit.
    """
    row = find_launcher(spec)
    given = {} if spec.options is None else spec.options
    if isinstance(given, Mapping):
        made = options_from(row.options, given, launcher=row.name)
        return attrs.evolve(spec, options=made)
    if type(given) is not row.options:
        wanted = "None" if row.options is None else f"a {row.options.__name__}"
        raise LaunchError(
            f"LaunchSpec(launcher={row.name!r}, options={type(given).__name__}(...)): this "
            f"launcher takes {wanted}."
        )
    return spec


def prepare(spec: LaunchSpec, machine: Machine | None = None) -> Invocation:
    """What `run` would start, without starting it.

    Args:
        spec: What to launch.
        machine: Where; found out by default.

    Raises:
        LaunchError: the spec does not fit its launcher.

    Example:
        >>> from fxtrain.launch import LaunchSpec, Machine, prepare, show
        >>> spec = LaunchSpec(target="train.py", launcher="tpu")
        >>> show(prepare(spec, Machine(threads_chosen=True)))[:21]
        'PJRT_DEVICE=TPU pytho'
    """
    row, spec = find_launcher(spec), with_options(spec)
    if machine is None:
        machine = look(
            os.environ,
            mpi=spec.options.program if "mpi" in row.needs else "",
            port="port" in row.needs and spec.nodes == 1,
            hostfile=spec.options.hostfile if "hosts" in row.needs else "",
            route=_route(spec, far="route" in row.needs),
        )
    return row.invocation(spec, machine)


def _route(spec: LaunchSpec, *, far: bool) -> Route | None:
    if spec.nodes == 1:
        return loopback_route()
    if not far or not spec.main_address:
        return None
    return find_route(spec.main_address, spec.port, local=spec.local_address)


def _check_local(spec: LaunchSpec) -> None:
    """Refuse an address of another machine, at which this one could only wait."""
    if spec.local_address and not is_local(spec.local_address.strip("[]")):
        raise LaunchError(
            f"LaunchSpec(local_address={spec.local_address!r}): this machine has no such "
            f"address. Name an address of this machine by which the other nodes reach it; leave "
            f"it out, and the one of the way to the main address is taken."
        )


def run(spec: LaunchSpec) -> LaunchResult:
    """Run a program on all ranks and wait until they have ended.

    The ranks share this process's output. Signals go on to them. When one fails, the others
    are ended.

    Effects:
        Those of the launcher: the native one loads torch and sets variables of this process,
        which the ranks inherit; the others write files and start a program. Call it in the
        main thread, where signals arrive.

    Raises:
        LaunchError: there is no such program or launcher, or the ranks could not be started.
    """
    row = find_launcher(spec)
    if row.here:
        check_target(spec)
        _check_local(spec)
    return row.run(spec, prepare(spec))
