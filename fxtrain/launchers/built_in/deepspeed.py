"""DeepSpeed's launcher: ranks on this machine, or on those of a hostfile and its filters."""

import base64
import json
import re
import shlex
from collections.abc import Mapping
from typing import Literal

import attrs

from fxtrain.errors import LaunchError
from fxtrain.launchers.launcher import RENDEZVOUS_FIELDS, Launcher
from fxtrain.launchers.machine import Machine
from fxtrain.launchers.process import ERRORS
from fxtrain.launchers.program import rank_command, remote_environment, shared_environment
from fxtrain.launchers.spec import Invocation, LaunchSpec, count, launch_record

Hosts = dict[str, tuple[int, ...]]  # name of a machine to the slots in use, in order

_PORT = 29_500  # DeepSpeed's default as well
# The file from which DeepSpeed's runner reads variables for the ranks.
_VARIABLES = "fxtrain-launch/deepspeed.env"
_BY_COUNT = ("openmpi", "mpich", "impi", "mvapich")


@launch_record
class DeepSpeedOptions:
    """The machines and slots to use, and how to reach them.

    Attributes:
        hostfile: File with lines such as `worker-0 slots=8`; without one, this machine.
        include: Only these machines and slots of it, such as worker-0@worker-1:0,2.
        exclude: All but these.
        runner: How to start ranks on several machines.
        runner_args: Further arguments for it, one each; not for pdsh.
        force_multi: Use the runner even for a single machine, which may be a remote one.
        ssh_port: Port of ssh, for pdsh.
        folder: Working folder of the program on the machines; by default the current one.
        python: The interpreter there; by default this one.
    """

    hostfile: str = ""
    include: str = ""
    exclude: str = ""
    runner: Literal["pdsh", "openmpi", "mpich", "impi", "mvapich", "slurm"] = "pdsh"
    runner_args: tuple[str, ...] = ()
    force_multi: bool = False
    ssh_port: int | None = attrs.field(default=None, validator=count(1))
    folder: str = ""
    python: str = ""


def deepspeed(spec: LaunchSpec, machine: Machine) -> Invocation:
    """DeepSpeed's launcher on this machine, its pdsh command line, or its runner otherwise.

    One rank runs on each slot that remains after the filters. With a hostfile, `nodes` above 1
    uses its first machines, and `ranks` above 1 the first slots of each.

    Raises:
        LaunchError: a filter or a field does not match the hostfile or the runner.

    Example:
        >>> from fxtrain.launchers import DeepSpeedOptions, LaunchSpec, Machine, deepspeed
        >>> options = DeepSpeedOptions(hostfile="hosts", include="b:0@a")
        >>> spec = LaunchSpec(target="train.py", options=options)
        >>> deepspeed(spec, Machine(hosts="a slots=2\\nb slots=2")).argv[:6]
        ('pdsh', '-S', '-f', '1024', '-w', 'a,b')
    """
    hosts = _hosts(spec, machine)
    options = spec.options
    if len(hosts) == 1 and not options.force_multi:
        return _here(spec, machine, hosts)
    if options.runner != "pdsh":
        return _by_runner(spec, machine, hosts)
    if options.runner_args:
        raise LaunchError("The option runner_args is for runners other than pdsh. Omit it.")
    return Invocation(
        argv=pdsh_argv(
            spec,
            hosts,
            folder=options.folder or machine.folder,
            python=options.python or machine.python,
        ),
        env={
            "PDSH_RCMD_TYPE": "ssh",
            **({"PDSH_SSH_ARGS_APPEND": f"-p {options.ssh_port}"} if options.ssh_port else {}),
        },
    )


def _hosts(spec: LaunchSpec, machine: Machine) -> Hosts:
    options = spec.options
    if not options.hostfile:
        return _slots_here(spec)
    if spec.gpus:
        raise LaunchError(
            "LaunchSpec(gpus=...): with a hostfile, slots are GPUs. Choose them with the option "
            "include, such as worker-0:0,2."
        )
    filtered = options.include or options.exclude
    if filtered and (spec.ranks > 1 or spec.nodes > 1):
        raise LaunchError(
            f"LaunchSpec(ranks={spec.ranks}, nodes={spec.nodes}) with a filter: include and "
            f"exclude already choose them. Omit ranks and nodes."
        )
    hosts = filter_hosts(
        read_hosts(machine.hosts, f"the hostfile {options.hostfile}"),
        options.include,
        options.exclude,
    )
    if spec.nodes > len(hosts):
        raise LaunchError(f"nodes={spec.nodes}, but the hostfile only has {', '.join(hosts)}.")
    if spec.nodes > 1:
        hosts = dict(list(hosts.items())[: spec.nodes])
    short = [host for host, slots in hosts.items() if spec.ranks > len(slots)]
    if short:
        raise LaunchError(
            f"ranks={spec.ranks} on each machine, but the hostfile has fewer slots for "
            f"{', '.join(short)}."
        )
    if spec.ranks > 1:
        hosts = {host: slots[: spec.ranks] for host, slots in hosts.items()}
    return hosts


def _slots_here(spec: LaunchSpec) -> Hosts:
    """This machine, whose slots are the requested ranks or GPUs."""
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
    chosen = tuple(int(gpu) for gpu in spec.gpus[: spec.ranks])
    return {"localhost": chosen or tuple(range(spec.ranks))}


def _here(spec: LaunchSpec, machine: Machine, hosts: Hosts) -> Invocation:
    """A single machine means this one, as in DeepSpeed's own command."""
    words = rank_command(spec, machine.python, errors=ERRORS)
    (slots,) = hosts.values()
    shared = attrs.evolve(spec, ranks=len(slots))
    return Invocation(
        argv=(
            *(machine.python, "-u", "-m", "deepspeed.launcher.launch"),
            world_info(hosts),
            f"--master_addr={spec.main_address or '127.0.0.1'}",
            f"--master_port={spec.main_port or machine.port or _PORT}",
            *("--no_local_rank", "--log_level=warning"),
            *words[words.index("-u") + 1 :],
        ),
        env=_on_cpu(spec) | shared_environment(shared, machine),
    )


def _by_runner(spec: LaunchSpec, machine: Machine, hosts: Hosts) -> Invocation:
    """Run DeepSpeed's runner, which knows the arguments of mpirun and srun."""
    options = spec.options
    filtered = options.include or options.exclude
    if options.runner in _BY_COUNT and (filtered or spec.ranks > 1 or spec.nodes > 1):
        raise LaunchError(
            f"DeepSpeed's runner {options.runner} uses the whole hostfile. Omit include, "
            f"exclude, nodes and ranks, or choose runner=pdsh."
        )
    address, port = spec.main_address or next(iter(hosts)), spec.main_port or _PORT
    arguments = {
        "hostfile": options.hostfile,
        "include": options.include,
        "exclude": options.exclude,
        "num_nodes": spec.nodes if spec.nodes > 1 else "",
        "num_gpus": spec.ranks if spec.ranks > 1 else "",
        "launcher": options.runner,
        "launcher_args": shlex.join(options.runner_args),
        "master_addr": address,
        "master_port": port,
    }
    flags = {
        "no_local_rank": True,
        "force_multi": options.force_multi,
        "module": spec.module,
        "no_python": spec.executable,
    }
    argv = (
        *(options.python or machine.python, "-m", "deepspeed.launcher.runner"),
        *(f"--{name}={value}" for name, value in arguments.items() if value != ""),
        *(f"--{name}" for name, said in flags.items() if said),
        *(spec.target, *spec.args),
    )
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    text = _lines(meeting | _on_cpu(spec) | remote_environment(spec))
    return Invocation(argv=argv, env={"DS_ENV_FILE": _VARIABLES}, files={_VARIABLES: text})


def _lines(variables: dict[str, str]) -> str:
    odd = [name for name, value in variables.items() if "\n" in value or '"' in value]
    if odd:
        raise LaunchError(
            f"{', '.join(odd)}: DeepSpeed's runner reads variables from lines of a file, so "
            f"their values cannot contain quotes or line breaks. Choose runner=pdsh."
        )
    return "".join(f"{name}={value}\n" for name, value in variables.items())


def _on_cpu(spec: LaunchSpec) -> dict[str, str]:
    """Choose GPUs here: DeepSpeed's launcher resets the visible ones to its slots."""
    return {"DS_ACCELERATOR": "cpu"} if spec.cpu else {}


DEEPSPEED = Launcher(
    name="deepspeed",
    help="DeepSpeed's launcher, on this machine or on those of its hostfile",
    invocation=deepspeed,
    options=DeepSpeedOptions,
    uses=[*RENDEZVOUS_FIELDS, "log_dir"],
    needs=["port", "hosts"],
)


# No machine has 10,000 slots: they are listed one by one.
_LINE = re.compile(r"(\S{1,255})\s+slots=(\d{1,4})(?:\s.*)?")
_SHOWN = 200  # characters of a line
_FAN_OUT = 1024  # as in DeepSpeed's runner


def read_hosts(text: str, what: str = "the hostfile") -> Hosts:
    """Machines and their slots from the text of a hostfile.

    Args:
        text: Lines such as `worker-0 slots=8`; empty lines and comments after # are ignored.
        what: Its name in messages.

    Raises:
        LaunchError: a line is invalid, a name appears twice, or there is none.

    Example:
        >>> from fxtrain.launchers.built_in.deepspeed import read_hosts
        >>> read_hosts("a slots=2\\nb slots=1  # the small one")
        {'a': (0, 1), 'b': (0,)}
    """
    hosts: Hosts = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        if match is None or match[1] in hosts:
            problem = (
                "not a machine and its slots" if match is None else f"{match[1]} appears twice"
            )
            raise LaunchError(
                f"Line {number} of {what} is {line.strip()[:_SHOWN]!r}: {problem}. Write one "
                f"line per machine, its name and its slots: `worker-0 slots=8`."
            )
        hosts[match[1]] = tuple(range(int(match[2])))
    if not hosts:
        raise LaunchError(f"No machine in {what}. Add lines such as: worker-0 slots=8")
    return hosts


def filter_hosts(
    hosts: Mapping[str, tuple[int, ...]], include: str = "", exclude: str = ""
) -> Hosts:
    """The machines that remain after the filters, in the order of the hostfile.

    Args:
        hosts: Machines and slots.
        include: Only these, `worker-0@worker-1:0,2`: all slots of one, two of the other.
        exclude: All but these.

    Raises:
        LaunchError: both filters are given, they name unknown machines, or nothing remains.

    Example:
        >>> from fxtrain.launchers.built_in.deepspeed import filter_hosts
        >>> filter_hosts({"a": (0, 1), "b": (0, 1)}, exclude="a@b:0")
        {'b': (1,)}
    """
    if include and exclude:
        raise LaunchError(
            f"include={include!r} and exclude={exclude!r} cannot be combined. Use one of them."
        )
    named = {host: _slots(host, slots, hosts) for host, slots in _parts(include or exclude)}
    left: Hosts = {}
    for host, slots in hosts.items():
        if include:
            left[host] = named.get(host, ())
        else:
            left[host] = tuple(slot for slot in slots if slot not in named.get(host, ()))
    left = {host: slots for host, slots in left.items() if slots}
    if not left:
        raise LaunchError(f"include={include!r}, exclude={exclude!r} leave no slot to run on.")
    return left


def pdsh_argv(
    spec: LaunchSpec, hosts: Mapping[str, tuple[int, ...]], *, folder: str, python: str
) -> tuple[str, ...]:
    """The command line that starts every rank over pdsh and ssh.

    Each machine runs `deepspeed.launcher.launch`, which sets the variables that `detect`
    reads and starts one process per slot.

    Args:
        spec: The program, its variables, and where ranks connect; by default the first machine.
        hosts: Machines and the slots to use.
        folder: Working folder on every machine.
        python: The interpreter there.

    Example:
        >>> from fxtrain.launchers import LaunchSpec
        >>> from fxtrain.launchers.built_in.deepspeed import pdsh_argv
        >>> spec = LaunchSpec(target="train.py")
        >>> pdsh_argv(spec, {"a": (0,)}, folder="/work", python="python")[:6]
        ('pdsh', '-S', '-f', '1024', '-w', 'a')
    """
    variables = (_on_cpu(spec) | remote_environment(spec)).items()
    return (
        *("pdsh", "-S", "-f", str(_FAN_OUT), "-w", ",".join(hosts)),
        "".join(f"export {name}={shlex.quote(value)}; " for name, value in variables),
        f"cd {shlex.quote(folder)};",
        *(shlex.quote(python), "-u", "-m", "deepspeed.launcher.launch"),
        world_info(hosts),
        "--node_rank=%n",
        f"--master_addr={spec.main_address or next(iter(hosts))}",
        f"--master_port={spec.main_port or _PORT}",
        *(("--module",) if spec.module else ()),
        *(("--no_python",) if spec.executable else ()),
        "--no_local_rank",
        *map(shlex.quote, (spec.target, *spec.args)),  # the remote shell splits them again
    )


def world_info(hosts: Mapping[str, tuple[int, ...]]) -> str:
    """Machines and slots, encoded for `deepspeed.launcher.launch`."""
    slots = json.dumps({host: list(used) for host, used in hosts.items()})
    return f"--world_info={base64.urlsafe_b64encode(slots.encode()).decode()}"


def _parts(text: str) -> list[tuple[str, tuple[int, ...] | None]]:
    parts: list[tuple[str, tuple[int, ...] | None]] = []
    for part in filter(None, text.split("@")):
        host, colon, slots = part.partition(":")
        if not colon:
            parts.append((host, None))
        elif re.fullmatch(r"\d+(,\d+)*", slots):
            parts.append((host, tuple(sorted({int(slot) for slot in slots.split(",")}))))
        else:
            raise LaunchError(
                f"{part!r} is not a valid filter. Write a machine, or a machine and its "
                f"slots: worker-1:0,2"
            )
    return parts


def _slots(
    host: str, slots: tuple[int, ...] | None, hosts: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...]:
    if host not in hosts:
        raise LaunchError(f"The filter names {host!r}, but the hostfile has {', '.join(hosts)}.")
    unknown = [str(slot) for slot in slots or () if slot not in hosts[host]]
    if unknown:
        raise LaunchError(
            f"The filter names slots {', '.join(unknown)} of {host!r}, which has "
            f"{len(hosts[host])} slots, numbered from 0."
        )
    return hosts[host] if slots is None else slots
