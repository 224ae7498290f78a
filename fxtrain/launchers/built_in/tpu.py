"""TPUs: this host, or all hosts of a pod through gcloud."""

import re
import shlex
from collections.abc import Sequence

import attrs

from fxtrain.errors import LaunchError
from fxtrain.launchers.launcher import ERRORS, Launcher
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.program import (
    plain_command,
    rank_command,
    remote_environment,
    shared_environment,
)
from fxtrain.launchers.spec import Invocation, LaunchSpec, each, launch_record

_plain = each(re.compile(r"[^\s\"'\\]+").fullmatch, expected="a word without spaces or quotes")


@launch_record
class TpuPodOptions:
    """Which TPU, and how to reach its hosts.

    Attributes:
        name: Name of the TPU VM.
        zone: Its zone; by default gcloud's own.
        project: Its project; by default gcloud's own.
        workers: Hosts to run on: "all", one number, or several such as 0,2-3.
        folder: Working folder of the program on the hosts; by default the home folder.
        python: The interpreter there.
        sudo: Run the program as root.
        internal_ip: Connect to the hosts inside their network.
        setup: Commands to run before the program, one each.
        extra: Further options for gcloud compute tpus tpu-vm ssh, one each.
    """

    name: str = attrs.field(default="", validator=_plain)
    zone: str = attrs.field(default="", validator=_plain)
    project: str = attrs.field(default="", validator=_plain)
    workers: str = attrs.field(
        default="all", validator=each(re.compile(r"all|[\d,-]+").fullmatch, expected="all or 0,2-3")
    )
    folder: str = ""
    python: str = "python3"
    sudo: bool = False
    internal_ip: bool = False
    setup: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


def tpu(spec: LaunchSpec, machine: Machine) -> Invocation:
    """The program once on this host: one process drives all of its chips."""
    _check(spec)
    return Invocation(
        argv=rank_command(spec, machine.python, errors=ERRORS),
        env={"PJRT_DEVICE": "TPU"} | shared_environment(spec, machine),
    )


def tpu_pod(spec: LaunchSpec, machine: Machine) -> Invocation:
    """The program on every host of a pod, where it must already exist."""
    _check(spec)
    options = spec.options
    env = {"PJRT_DEVICE": "TPU"} | remote_environment(spec)
    words = ["env", *(f"{name}={value}" for name, value in env.items())]
    words = (["sudo"] if options.sudo else []) + words
    command = shlex.join([*words, *plain_command(spec, options.python)])
    return Invocation(argv=pod_command(options, command))


def pod_command(options: TpuPodOptions, command: str) -> tuple[str, ...]:
    """gcloud's command line that runs a shell command on the hosts of a pod, after its `setup`."""
    if not options.name:
        raise LaunchError("A TPU pod needs the option name, as gcloud lists it.")
    place = [f"cd {_folder(options.folder)}"] if options.folder else []
    return (
        *("gcloud", "compute", "tpus", "tpu-vm", "ssh", options.name),
        *([f"--zone={options.zone}"] if options.zone else []),
        *([f"--project={options.project}"] if options.project else []),
        *(["--internal-ip"] if options.internal_ip else []),
        *options.extra,
        f"--worker={options.workers}",
        f"--command={' && '.join([*place, *options.setup, command])}",
    )


def setup_command(
    options: TpuPodOptions, *, commands: Sequence[str] = (), install: str = ""
) -> tuple[str, ...]:
    """gcloud's command line that prepares the hosts of a pod. The first failing command ends it.

    Its `setup` runs first, then pip for what is to be installed, then the commands.
    """
    pip = [f"{options.python} -m pip install {shlex.quote(install)}"] if install else []
    wanted = [*options.setup, *pip, *commands]
    if not wanted:
        raise LaunchError(
            "There is nothing to run on the hosts. Pass --command or --install, or set "
            "launch.options.setup in the launch file."
        )
    return pod_command(attrs.evolve(options, setup=()), " && ".join(wanted))


def _folder(text: str) -> str:
    """A folder for a shell, which expands ~ only outside quotes."""
    home, slash, rest = text.partition("/")
    if not re.fullmatch(r"~[\w.-]*", home):
        return shlex.quote(text)
    return home + slash + (shlex.quote(rest) if rest else "")


def _check(spec: LaunchSpec) -> None:
    if spec.ranks > 1:
        raise LaunchError(
            f"LaunchSpec(ranks={spec.ranks}) on a TPU: one process drives all chips of a host. "
            f"Omit ranks."
        )
    if spec.cpu or spec.gpus or spec.bind != "none":
        raise LaunchError("The fields cpu, gpus and bind do not apply to a TPU. Omit them.")


TPU = Launcher(name="tpu", help="one process for the TPU of this host", invocation=tpu)
TPU_POD = Launcher(
    name="tpu-pod",
    help="the hosts of a TPU pod, through gcloud",
    invocation=tpu_pod,
    options=TpuPodOptions,
    here=False,
)
