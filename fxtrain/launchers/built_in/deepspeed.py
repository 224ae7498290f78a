"""DeepSpeed's launcher: ranks on this machine, or on those of a hostfile and its filters."""

import base64
import json
import shlex
from typing import Literal

from fxtrain._record import shown
from fxtrain.errors import LaunchError
from fxtrain.launchers.launcher import ERRORS, RENDEZVOUS_FIELDS, Launcher
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.program import rank_command, remote_environment, shared_environment
from fxtrain.launchers.spec import Invocation, LaunchSpec, launch_record

_PORT = 29_500  # DeepSpeed's default as well
# The file from which DeepSpeed's runner reads variables for the ranks.
_VARIABLES = "fxtrain-launch/deepspeed.env"


@launch_record
class DeepSpeedOptions:
    """The machines and slots to use, and how to reach them.

    Attributes:
        hostfile: File with lines such as `worker-0 slots=8`; without one, this machine.
        include: Only these machines and slots of it, such as worker-0@worker-1:0,2.
        exclude: All but these.
        runner: How to start ranks on several machines.
        runner_args: Further arguments for it, one each.
    """

    hostfile: str = ""
    include: str = ""
    exclude: str = ""
    runner: Literal["pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"] = "pdsh"
    runner_args: tuple[str, ...] = ()


def deepspeed(spec: LaunchSpec, machine: Machine) -> Invocation:
    """DeepSpeed's launcher on this machine, or its runner for the machines of a hostfile.

    One rank runs on each slot that remains after the filters. With a hostfile, `nodes` above 1
    uses its first machines, and `ranks` above 1 the first slots of each.
    """
    return (_by_runner if spec.options.hostfile else _here)(spec, machine)


def _here(spec: LaunchSpec, machine: Machine) -> Invocation:
    options = spec.options
    if options.include or options.exclude or spec.nodes > 1:
        raise LaunchError(
            "Filters and several nodes need the option hostfile, a file with lines such as "
            "`worker-0 slots=8`. On this machine, use ranks and gpus."
        )
    if not all(gpu.isdecimal() for gpu in spec.gpus):
        raise LaunchError(
            f"LaunchSpec(gpus={','.join(spec.gpus)}): DeepSpeed's launcher needs numbers of GPUs."
        )
    slots = [int(gpu) for gpu in spec.gpus[: spec.ranks]] or [*range(spec.ranks)]
    world = base64.urlsafe_b64encode(json.dumps({"localhost": slots}).encode()).decode()
    words = rank_command(spec, machine.python, errors=ERRORS)
    return Invocation(
        argv=(
            *(machine.python, "-u", "-m", "deepspeed.launcher.launch"),
            f"--world_info={world}",
            f"--master_addr={spec.main_address or '127.0.0.1'}",
            f"--master_port={spec.main_port or machine.port or _PORT}",
            *("--no_local_rank", "--log_level=warning"),
            *words[words.index("-u") + 1 :],
        ),
        env=_on_cpu(spec) | shared_environment(spec, machine),
    )


def _by_runner(spec: LaunchSpec, machine: Machine) -> Invocation:
    """DeepSpeed's runner, which reads the hostfile and knows pdsh, mpirun and srun."""
    options = spec.options
    if spec.gpus:
        raise LaunchError(
            "LaunchSpec(gpus=...): with a hostfile, slots are GPUs. Choose them with the option "
            "include, such as worker-0:0,2."
        )
    if options.runner != "pdsh" and not spec.main_address:
        raise LaunchError(
            f"With runner={options.runner}, ranks connect to main_address. Set it to the name of "
            f"the first machine."
        )
    if options.runner == "pdsh" and " " in machine.python:
        raise LaunchError(
            f"DeepSpeed's runner names Python to the shells of the machines without quotes, so its "
            f"path cannot contain spaces, as {shown(machine.python)} does. Install fxtrain in a "
            f"folder without spaces, or use another launcher."
        )
    port = spec.main_port or _PORT
    arguments = {
        "hostfile": options.hostfile,
        "include": options.include,
        "exclude": options.exclude,
        "num_nodes": spec.nodes if spec.nodes > 1 else "",
        "num_gpus": spec.ranks if spec.ranks > 1 else "",
        "launcher": options.runner,
        "launcher_args": shlex.join(options.runner_args),
        "master_addr": spec.main_address,
        "master_port": port,
    }
    flags = {
        "no_local_rank": True,
        "no_ssh_check": bool(spec.main_address),
        "module": spec.module,
        "no_python": spec.executable,
    }
    argv = (
        *(machine.python, "-m", "deepspeed.launcher.runner"),
        *(f"--{name}={value}" for name, value in arguments.items() if value != ""),
        *(f"--{name}" for name, said in flags.items() if said),
        *(spec.target, *spec.args),
    )
    rendezvous = {"MASTER_ADDR": spec.main_address, "MASTER_PORT": str(port)}
    variables = (
        (rendezvous if options.runner != "pdsh" else {}) | _on_cpu(spec) | remote_environment(spec)
    )
    odd = [name for name, value in variables.items() if "\n" in value or '"' in value]
    if odd:
        raise LaunchError(
            f"{', '.join(odd)}: DeepSpeed's runner reads variables from lines of a file, so "
            f"their values cannot contain quotes or line breaks."
        )
    text = "".join(f"{name}={value}\n" for name, value in variables.items())
    return Invocation(argv=argv, env={"DS_ENV_FILE": _VARIABLES}, files={_VARIABLES: text})


def _on_cpu(spec: LaunchSpec) -> dict[str, str]:
    """Choose GPUs here: DeepSpeed's launcher resets the visible ones to its slots."""
    return {"DS_ACCELERATOR": "cpu"} if spec.cpu else {}


DEEPSPEED = Launcher(
    name="deepspeed",
    help="DeepSpeed's launcher, on this machine or on those of its hostfile",
    invocation=deepspeed,
    options=DeepSpeedOptions,
    uses=[*RENDEZVOUS_FIELDS, "log_dir"],
)
